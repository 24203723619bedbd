// The common code of the clients in Node: flags, their packages, named checks, and the report for the runner.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const NAMES = ["url", "model", "api-key", "report", "modules"];

function expect(holds, what) {
  if (!holds) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export async function connect() {
  const options = Object.fromEntries(NAMES.map((name) => [name, { type: "string" }]));
  const { values: flags } = parseArgs({ options });

  // Packages are found from the place of the module that imports them.
  const loader = `${flags.modules}/load.mjs`;
  writeFileSync(loader, "export const load = (name) => import(name);\n");
  const { load } = await import(pathToFileURL(loader));

  // Run every check, also after a failure, and write the report.
  async function finish(checks, packages) {
    const rows = [];
    for (const [name, check] of Object.entries(checks)) {
      const start = Date.now();
      let error = null;
      try {
        await check();
      } catch (failure) {
        error = `${failure.constructor.name}: ${failure.message}`.slice(0, 2000);
      }
      rows.push({ name, seconds: (Date.now() - start) / 1000, error });
      console.error(`${error === null ? "ok" : "FAILED"}\t${name}${error === null ? "" : `: ${error}`}`);
    }
    const version = (name) => JSON.parse(readFileSync(`${flags.modules}/node_modules/${name}/package.json`, "utf8")).version;
    const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
    writeFileSync(flags.report, JSON.stringify({ versions: { ...versions, node: process.version }, checks: rows }));
    process.exit(rows.some((row) => row.error !== null) ? 1 : 0);
  }

  return { flags, load, expect, finish };
}
