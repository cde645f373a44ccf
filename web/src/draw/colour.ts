// Colours that stay apart for colour-blind readers, on a light and on a dark page. "More" is always what stands out
// most from the page: dark on light, light on dark.
import { scaleLinear } from "d3-scale";

export interface Colours {
  dark: boolean;
  /** 0 (nothing) to 1 (most) as a CSS colour. */
  ramp(share: number): string;
  /** Where there is no number. */
  nothing: string;
  /** Colours for kinds without an order (Okabe and Ito's, made for colour-blind readers), repeating after eight. */
  kind(index: number): string;
  /** 256 colours of the ramp as 0xAABBGGRR, for pictures made of pixels. */
  pixels: Uint32Array;
}

const KINDS_LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3f9bd1", "#7a5195", "#6b6b6b"];
const KINDS_DARK = ["#56b4e9", "#e69f00", "#2dc39a", "#e48fbf", "#f0e442", "#9ad0f5", "#b79ad6", "#b3b3b3"];

// from green to blue as lightness falls (or rises): the order is seen without any sense of hue
const RAMP_LIGHT = ["#f5f8f6", "#d9efdb", "#b0dfc0", "#7bc9c4", "#45acd0", "#2183b9", "#11599c", "#0a3570"];
const RAMP_DARK = ["#1d2631", "#1d3a58", "#1b5683", "#2279a8", "#3aa0bd", "#6cc4bf", "#b2e2b4", "#f6fbc9"];

function make(dark: boolean): Colours {
  const stops = dark ? RAMP_DARK : RAMP_LIGHT;
  const at = scaleLinear(stops.map((_, i) => i / (stops.length - 1)), stops);
  const steps = Array.from({ length: 256 }, (_, i) => at(i / 255));
  const kinds = dark ? KINDS_DARK : KINDS_LIGHT;
  return {
    dark,
    ramp: (share) => steps[Math.round(255 * Math.min(1, Math.max(0, share)))]!,
    nothing: dark ? "#12171c" : "#ebe8e4",
    kind: (index) => kinds[((index % 8) + 8) % 8]!,
    pixels: Uint32Array.from(steps, (step) => {
      const [red, green, blue] = channels(step);
      return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
    }),
  };
}

export const light = make(false);
export const dark = make(true);

function channels(colour: string): [number, number, number] {
  const numbers = colour.startsWith("#")
    ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16))
    : (colour.match(/\d+(\.\d+)?/g) ?? []).map(Number);
  return [Math.round(numbers[0] ?? 0), Math.round(numbers[1] ?? 0), Math.round(numbers[2] ?? 0)];
}

/** Black or white: what can be read on a background. */
export function ink(background: string): string {
  const [red, green, blue] = channels(background).map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#10161d" : "#ffffff";
}
