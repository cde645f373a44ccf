// An order of heads in which those that are alike stand beside each other, cluster after cluster.

/** cluster: number of each head's cluster, null for none; those come last. */
export function likeBesideLike(
  n: number,
  distance: (a: number, b: number) => number,
  cluster: readonly (number | null)[],
): number[] {
  const groups = new Map<number, number[]>();
  for (let head = 0; head < n; head++) {
    const key = cluster[head] ?? Infinity;
    groups.set(key, [...(groups.get(key) ?? []), head]);
  }
  return [...groups].sort(([a], [b]) => a - b).flatMap(([, members]) => chained(members, distance));
}

/** Joins the two chains whose ends are nearest until there is one. */
function chained(members: number[], distance: (a: number, b: number) => number): number[] {
  const pairs: [number, number, number][] = [];
  for (const [i, a] of members.entries()) for (const b of members.slice(i + 1)) pairs.push([distance(a, b), a, b]);
  pairs.sort((a, b) => a[0] - b[0]);
  const chains = new Map(members.map((head) => [head, [head]]));
  for (const [, a, b] of pairs) {
    const [one, two] = [chains.get(a)!, chains.get(b)!];
    const ends = (chain: number[], head: number) => chain[0] === head || chain.at(-1) === head;
    if (one === two || !ends(one, a) || !ends(two, b)) continue;
    const joined = [...(one.at(-1) === a ? one : one.reverse()), ...(two[0] === b ? two : two.reverse())];
    for (const head of joined) chains.set(head, joined);
  }
  return chains.get(members[0]!) ?? [];
}
