// The one store: what the person chose. Views read it, change it with set(), and hear of changes through subscribe().

export interface State {
  /** name of the open view */
  view: string;
  /** what colours the head map: a metric of the table, "importance:<method>", "redundancy" or "role" */
  metric: string;
  /** picked heads (indexes into the document's heads), the last one is the one shown */
  selected: readonly number[];
  /** the head under the pointer */
  hovered: number | null;
  /** index of the example input */
  example: number;
  /** heads that are switched off on the live page */
  silenced: readonly number[];
  /** name of the filter of the head map, "" for none */
  filter: string;
  /** order of heads: at their numbers, by value within each layer, or all in one ranking */
  sort: "place" | "value" | "rank";
}

export type Listener = (state: Readonly<State>, changed: ReadonlySet<keyof State>) => void;

export interface Store {
  readonly now: Readonly<State>;
  set(change: Partial<State>): void;
  /** Calls listener when one of the keys changed (any change without keys); returns what ends it. */
  subscribe(listener: Listener, ...keys: (keyof State)[]): () => void;
}

export function store(first: State): Store {
  let now: Readonly<State> = first;
  const listeners = new Map<Listener, readonly (keyof State)[]>();
  return {
    get now() {
      return now;
    },
    set(change) {
      const keys = (Object.keys(change) as (keyof State)[]).filter((key) => !same(now[key], change[key]));
      if (!keys.length) return;
      now = { ...now, ...change };
      const changed = new Set(keys);
      for (const [listener, wanted] of [...listeners])
        if (listeners.has(listener) && (!wanted.length || wanted.some((key) => changed.has(key)))) listener(now, changed);
    },
    subscribe(listener, ...keys) {
      listeners.set(listener, keys);
      return () => listeners.delete(listener);
    },
  };
}

function same(a: unknown, b: unknown): boolean {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((value, i) => value === b[i]);
  return Object.is(a, b);
}

/** The head to show: the one picked last, or the first of all. */
export function current(state: Readonly<State>): number {
  return state.selected.at(-1) ?? 0;
}
