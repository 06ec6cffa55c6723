//! `exocell caps explain MODULE`: what a Wasm module or component imports, and what that needs.

use std::path::Path;

use exocell_cell::compile::given_bytes;
use exocell_cell::exovisor::{Admission, Import, ModuleLimits, Requirement};
use exocell_cell::granted::Links;
use exocell_cell::vmm::jail::ThreadClass;
use exocell_cell::vmm::jail::stage::{Fault, Given, Limits, Order, Stage, Task};
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, Layout};
use serde::{Deserialize, Serialize};

/// Who reads the module.
pub const STAGE: Stage = Stage { name: "explain", class: ThreadClass::Stage, work };
/// The longest answer: of a module that imports as much as it may, under names of usual length.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Names are the module's own: what is shown of one, and what the column of them is at most.
const NAME_CHARS_MAX: usize = 200;
const COLUMN_MAX: usize = 60;

/// One import of a module.
#[derive(Serialize, Deserialize)]
struct Row {
    /// Of a component's import its package, which is in its name again.
    module: String,
    name: String,
    /// The tier in Khronos' table, from "1" (what a language needs to start) to "3" (files and
    /// sockets); "unknown": no such import exists, and a call of it traps.
    tier: String,
    /// What a call does outside the isolate; empty if unknown.
    effect: String,
    /// The capabilities of which one is needed.
    needs: Vec<String>,
    /// Whether the table grants it.
    granted: bool,
}

/// The imports of the module at `path` under `caps`, for people or programs.
pub fn module(
    layout: &Layout,
    path: &Path,
    caps: &CapabilitySet,
    json: bool,
) -> Result<String, CellError> {
    let module = Links::outside(layout).module(path)?;
    let limits = Limits { answer_bytes: ANSWER_BYTES_MAX, ..Limits::of_memory(0) };
    let order = Order::new(STAGE.name, vec![Given::file(module.bytes())], limits);
    let rows: Vec<Row> = module.within(order, caps, None, &caps.to_json(), || ())?;
    if json {
        return serde_json::to_string_pretty(&rows)
            .map_err(|error| CellError::host("cannot write JSON")(error.into()));
    }
    Ok(table(&rows))
}

/// What the stage does.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let broken = |error: &dyn std::fmt::Display| Fault::Jail(error.to_string());
    let caps = CapabilitySet::parse(&task.request::<String>()?, Path::new("/"));
    let caps = caps.map_err(|error| broken(&error))?;
    let found = Admission::requirements(&given_bytes(task)?, &ModuleLimits::default());
    let found = found.map_err(|error| Fault::Input(error.to_string()))?;
    let rows: Vec<Row> = found.into_iter().map(|import| row(import, &caps)).collect();
    serde_json::to_vec(&rows).map_err(|error| broken(&error))
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
    Row { module, name, tier: tier.to_owned(), effect: effect.to_owned(), needs, granted }
}

fn words(import: &Import) -> (&'static str, &'static str) {
    (import.tier.name(), import.effect.name())
}

/// A name for a terminal: escaped, and cut where it has no end.
fn shown(name: &str) -> String {
    let mut escaped = name.escape_debug();
    let mut text: String = escaped.by_ref().take(NAME_CHARS_MAX).collect();
    if escaped.next().is_some() {
        text.push_str("...");
    }
    text
}

fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "it imports nothing".to_owned();
    }
    let widths = rows.iter().map(|row| shown(&row.name).chars().count());
    let width = widths.max().unwrap_or(0).clamp(6, COLUMN_MAX);
    let mut lines = vec![format!("{:width$}  TIER       EFFECT    GRANTED  NEEDS", "IMPORT")];
    lines.extend(rows.iter().map(|row| {
        let needs = match row.tier.as_str() {
            "unknown" => format!("nobody has {}: a call of it traps", shown(&row.full_name())),
            _ if row.needs.is_empty() => "nothing".to_owned(),
            _ => row.needs.join(" or "),
        };
        let granted = if row.granted { "yes" } else { "no" };
        let name = shown(&row.name);
        format!("{name:width$}  {:9}  {:8}  {granted:7}  {needs}", row.tier, row.effect)
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_any_length_and_kind_make_a_table() {
        let row = |name: &str| Row {
            module: "m".to_owned(),
            name: name.to_owned(),
            tier: "unknown".to_owned(),
            effect: String::new(),
            needs: Vec::new(),
            granted: false,
        };
        // Longer than the widest column that there can be, once it is escaped.
        let rows = [row("f"), row(&"\u{1}".repeat(20_000)), row("\u{1b}[2J\u{202e}")];
        let table = table(&rows);
        assert_eq!(table.lines().count(), 4);
        assert!(table.lines().all(|line| line.chars().count() < 600), "{table}");
        let line = table.lines().find(|line| line.starts_with("f ")).unwrap();
        assert!(line.len() < 140, "{line}");
        assert!(table.lines().any(|line| line.starts_with("\\u{1b}[2J\\u{202e}")), "{table}");
        assert!(table.chars().all(|c| c == '\n' || !c.is_control()));
    }
}
