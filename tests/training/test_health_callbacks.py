"""HeadHealth in the real Trainers of transformers and Lightning: the run is the same to the bit."""

import importlib

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tests.helpers.models import gpt2_config
from torch.utils.data import DataLoader, Dataset

import manyheads as mh
from manyheads.training.head_health import HeadHealth

IDS = torch.randint(97, (24, 7), generator=torch.Generator().manual_seed(0))


class Texts(Dataset):
    def __len__(self):
        return len(IDS)

    def __getitem__(self, index):
        return {"input_ids": IDS[index], "labels": IDS[index]}


def gpt2():
    torch.manual_seed(1)
    config = gpt2_config(n_embd=20, n_layer=2, n_head=5, vocab_size=97, n_positions=32)
    return hf.GPT2LMHeadModel(config)  # with dropout 0.1


def same(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def train_transformers(model, folder, callbacks, **options):
    arguments = hf.TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=3, logging_steps=1, report_to=[], seed=3,
        save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=Texts(), callbacks=callbacks)
    trainer.train()
    return trainer.state.log_history, torch.get_rng_state()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}],
    ids=["plain", "accumulation", "checkpointing"],
)
def test_the_trainer_of_transformers(tmp_path, options, capsys):
    plain, watched = gpt2(), gpt2()
    health = HeadHealth(watched, every=2)
    without, state = train_transformers(plain, tmp_path / "a", [], **options)
    seen, other_state = train_transformers(watched, tmp_path / "b", [health.trainer_callback()], **options)
    assert same(plain, watched)
    assert torch.equal(state, other_state)
    assert [line["loss"] for line in without[:-1]] == [line["loss"] for line in seen[:-1]]
    assert health.history.steps == [2, 4, 6]
    assert len(health.history.rows) == 10
    logged = [line["step"] for line in seen if "heads/largest_logit" in line]
    assert logged == [2, 4, 6]
    assert bool(health.history["gradient_share"].isfinite().all())
    assert "heads/entropy" in capsys.readouterr().out  # what the Trainer prints


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request):
    return pytest.importorskip(request.param)


def module_of(lightning):
    class Language(lightning.LightningModule):
        """A module whose own forward is never called."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.decoder = mh.Decoder(15, heads=3, layers=2, vocabulary=97, dropout=0.1)
            self.losses = []

        def training_step(self, batch, index):
            ids = batch["input_ids"]
            loss = F.cross_entropy(self.decoder(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Language()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainer_of_lightning(lightning, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = []
    for watching in (False, True):
        module = module_of(lightning)
        health = HeadHealth(module, every=2)
        callback = health.lightning_callback()
        assert isinstance(callback, lightning.Callback)
        torch.manual_seed(2)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=parts,
            callbacks=[callback] if watching else [],
        )  # fmt: skip
        trainer.fit(module, DataLoader(Texts(), batch_size=4))
        runs.append((module, health, torch.get_rng_state(), trainer))
    (plain, unused, state, _), (watched, health, other_state, trainer) = runs
    assert plain.losses == watched.losses
    assert same(plain, watched)
    assert torch.equal(state, other_state)
    assert len(unused.history) == 0
    assert health.history.steps == ([2, 4, 6] if parts == 1 else [2])
    assert health.history.rows[0].site == "decoder.blocks.0.attention"
    assert "heads/largest_logit" in trainer.logged_metrics
    assert bool(health.history["spectral_norm"].isfinite().all())


def test_without_lightning_a_sentence_says_what_to_install(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)

    def missing(name, *others):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="lightning_callback needs Lightning: pip install lightning"):
        HeadHealth(gpt2()).lightning_callback()
