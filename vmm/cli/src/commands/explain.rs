//! `exocell caps explain MODULE`: what a Wasm module or component imports, and what that needs.

use std::path::Path;

use exocell_cell::exovisor::{Admission, Import, ModuleLimits, Requirement};
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, isolate};
use serde::Serialize;

/// One import of a module.
#[derive(Serialize)]
struct Row {
    /// Of a component's import its package, which is in its name again.
    module: String,
    name: String,
    /// The tier in Khronos' table, from "1" (what a language needs to start) to "3" (files and
    /// sockets); "unknown": no such import exists, and a call of it traps.
    tier: &'static str,
    /// What a call does outside the isolate; empty if unknown.
    effect: &'static str,
    /// The capabilities of which one is needed.
    needs: Vec<String>,
    /// Whether the table grants it.
    granted: bool,
}

/// The imports of the module at `path` under `caps`, for people or programs.
pub fn module(path: &Path, caps: &CapabilitySet, json: bool) -> Result<String, CellError> {
    let bytes = isolate::read_module(path)?;
    let found = Admission::requirements(&bytes, &ModuleLimits::default());
    let found = found.map_err(|error| CellError::Module(format!("{}: {error}", path.display())))?;
    let rows: Vec<Row> = found.into_iter().map(|import| row(import, caps)).collect();
    if json {
        return serde_json::to_string_pretty(&rows)
            .map_err(|error| CellError::host("cannot write JSON")(error.into()));
    }
    Ok(table(&rows))
}

impl Row {
    fn full_name(&self) -> String {
        match self.name.starts_with(&self.module) {
            true => self.name.clone(),
            false => format!("{}.{}", self.module, self.name),
        }
    }
}

fn row(found: Requirement, caps: &CapabilitySet) -> Row {
    let Requirement { module, name, import } = found;
    let (tier, effect) = import.map_or(("unknown", ""), words);
    let needs = import.map_or(&[][..], |import| import.needs);
    let needs = needs.iter().map(|kind| kind.name().to_owned()).collect();
    let granted = import.is_some_and(|import| import.is_granted(caps));
    Row { module, name, tier, effect, needs, granted }
}

fn words(import: &Import) -> (&'static str, &'static str) {
    (import.tier.name(), import.effect.name())
}

fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "it imports nothing".to_owned();
    }
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(6);
    let mut lines = vec![format!("{:width$}  TIER       EFFECT    GRANTED  NEEDS", "IMPORT")];
    lines.extend(rows.iter().map(|row| {
        let needs = match row.tier {
            "unknown" => format!("nobody has {}: a call of it traps", row.full_name()),
            _ if row.needs.is_empty() => "nothing".to_owned(),
            _ => row.needs.join(" or "),
        };
        let granted = if row.granted { "yes" } else { "no" };
        format!("{:width$}  {:9}  {:8}  {granted:7}  {needs}", row.name, row.tier, row.effect)
    }));
    lines.join("\n")
}
