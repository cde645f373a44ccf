// Numbers as they are read: few digits, a true minus sign, "–" where there is none.

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(digits - 1).replace("e+", "e").replace(/-/g, "−");
  const decimals = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return value.toFixed(Math.min(decimals, digits)).replace("-", "−");
}

/** "0.731 ± 0.002" */
export function measured(mean: number | null | undefined, se: number | null | undefined): string {
  if (se === null || se === undefined || !Number.isFinite(se)) return number(mean);
  const size = Math.abs(mean ?? 0);
  if (se > 0 && se < 0.001 && size >= 0.001 && size < 1000) {
    // as many decimals as the error has, so that both are read alike
    const decimals = Math.min(6, Math.ceil(-Math.log10(se)));
    return `${mean!.toFixed(decimals).replace("-", "−")} ± ${se.toFixed(decimals)}`;
  }
  return `${number(mean)} ± ${number(se)}`;
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = 100 * share;
  return `${value !== 0 && Math.abs(value) < 10 ? value.toFixed(1) : value.toFixed(0)}%`.replace("-", "−");
}

/** 4242 as "4 242", with a thin space. */
export function whole(value: number): string {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}
