// The notebook widget: anywidget calls render() with its model and an element.
import { parse } from "./document";
import { show } from "./page";

interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  on(event: string, listener: () => void): void;
  off(event: string, listener: () => void): void;
}

async function render({ model, el }: { model: Model; el: HTMLElement }): Promise<() => void> {
  const data = model.get("document") as DataView<ArrayBuffer>;
  // a copy: what comes from the kernel may be a part of a longer message
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice();
  const { state, close } = show(el, await parse(bytes));

  // what is picked here is known in Python, and what Python picks is shown here
  const picked = () => state.set({ selected: (model.get("picked") as number[] | undefined) ?? [] });
  picked();
  model.on("change:picked", picked);
  const end = state.subscribe(({ selected }) => {
    model.set("picked", [...selected]);
    model.save_changes();
  }, "selected");
  return () => {
    end();
    model.off("change:picked", picked);
    close();
  };
}

export default { render };
