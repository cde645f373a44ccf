import { en } from "./en";
import { zh } from "./zh";

/** Every word of the interface; a language that lacks one does not compile. */
export type Words = typeof en;

export const languages: Record<string, Words> = { en, zh };
