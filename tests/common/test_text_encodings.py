"""The command for a text that is not UTF-8 works as it is printed."""

import shutil
import subprocess

import pytest

from manyheads.data.text_lines import read_lines

TEXTS = {
    "gb18030": "注意力头各有分工。",
    "cp1252": "Köpfe teilen sich die Arbeit.",
    "utf-16": "Heads share the work.",
}


@pytest.mark.skipif(shutil.which("iconv") is None, reason="iconv is not installed")
@pytest.mark.parametrize("encoding", TEXTS)
def test_the_advice_works(encoding, tmp_path, monkeypatch):
    path = tmp_path / "a text.txt"
    path.write_bytes((TEXTS[encoding] + "\n").encode(encoding))
    with pytest.raises(ValueError, match="is not UTF-8") as error:
        list(read_lines(str(path), None))
    command = str(error.value).split("convert it: ")[1].split(" (-f is")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert list(read_lines(str(tmp_path / "utf8.txt"), None)) == [TEXTS[encoding]]
