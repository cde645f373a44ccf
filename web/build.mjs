// Builds src/ into the files that the Python package carries: page.js, page.css, widget.js.
// Their first line names the sha256 of the sources, so that a test without Node can say whether they are current.
//   node build.mjs [--out FOLDER]
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative, resolve, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { build, transformWithEsbuild } from "vite";

const here = dirname(fileURLToPath(import.meta.url));
const { values } = parseArgs({ options: { out: { type: "string", default: "../src/manyheads/view/static" } } });
const out = resolve(here, values.out);

/** sha256 over (path NUL bytes NUL) of every source, in the order of their paths; tests/web/test_built.py does the same. */
function sources() {
  const files = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)).split(sep).join("/"));
  files.push("build.mjs", "package.json", "package-lock.json", "tsconfig.json");
  const hash = createHash("sha256");
  for (const file of files.sort()) hash.update(file + "\0").update(readFileSync(join(here, file))).update("\0");
  return hash.digest("hex");
}

/** One self-contained file; the styles of both forms are page.css, which only the page's entry imports. */
function bundle(entry, file, format) {
  return build({
    root: here,
    configFile: false,
    logLevel: "warn",
    define: { "process.env.NODE_ENV": '"production"' },
    build: {
      outDir: out,
      emptyOutDir: false,
      target: "es2022",
      cssTarget: "chrome111",
      lib: { entry: join(here, entry), formats: [format], name: "manyheadsPage", fileName: () => file, cssFileName: "page" },
      rollupOptions: { output: { inlineDynamicImports: true } },
    },
  });
}

await bundle("src/start.ts", "page.js", "iife");
await bundle("src/widget.ts", "widget.js", "es");
// vite leaves the white space in modules, for the sake of other bundlers; nothing bundles this one again
const widget = join(out, "widget.js");
const small = await transformWithEsbuild(readFileSync(widget, "utf8"), widget, { minify: true, target: "es2022", sourcemap: false });
writeFileSync(widget, small.code);

const note = `/* manyheads page, sources sha256 ${sources()} */\n`;
for (const file of ["page.js", "page.css", "widget.js"]) {
  const path = join(out, file);
  // a report puts the script into its HTML, where this sequence would end it
  const text = readFileSync(path, "utf8").replaceAll("</script", "<\\/script");
  writeFileSync(path, note + text);
  console.log(`${relative(process.cwd(), path)}  ${(Buffer.byteLength(text) / 1024).toFixed(1)} kB`);
}
