// The notebook widget: anywidget calls render() with its model and an element.
import { parse } from "./document";
import { show } from "./page";

interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
}

async function render({ model, el }: { model: Model; el: HTMLElement }): Promise<() => void> {
  const data = model.get("document") as DataView;
  const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  const shown = show(el, await parse(bytes));
  return () => shown.close();
}

export default { render };
