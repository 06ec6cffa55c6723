//! `exocell caps`: is this table right, and what does it allow?

use std::path::Path;

use exocell_cell::parent::Parent;
use exocell_cell::xgate::{CapabilitySet, explain_json, explain_table};
use exocell_cell::{CellError, plan};

use super::{explain, run::read_table};
use crate::args::CapsCommand;
use crate::show::say;

/// The table to explain, and in a `vm` cell a line that says which that is.
fn table_of(file: Option<&Path>) -> Result<(CapabilitySet, String), CellError> {
    let Some(parent) = Parent::find()? else {
        return Ok((file.map_or_else(|| Ok(CapabilitySet::default()), read_table)?, String::new()));
    };
    let cells = format!("the table of this cell, {}", Parent::TABLE);
    Ok(match file {
        None => (parent.most, format!("{cells}: isolates in it have at most this\n\n")),
        Some(file) => {
            let own = read_table(file)?.within(&parent.most)?;
            (own, format!("{}, within {cells}\n\n", file.display()))
        }
    })
}

pub fn caps(command: CapsCommand) -> Result<u8, CellError> {
    match command {
        CapsCommand::Check { file } => match read_table(&file) {
            Ok(_) => {
                say!("{}: ok", file.display());
                Ok(0)
            }
            Err(error) => {
                eprintln!("exocell: {error}");
                Ok(1)
            }
        },
        CapsCommand::Explain { file, caps, json } => {
            let module = file.as_deref().filter(|path| plan::is_module(path));
            let table = if module.is_some() { caps } else { file.clone().or(caps) };
            let (set, origin) = table_of(table.as_deref())?;
            let text = match module {
                Some(path) => explain::module(path, &set, json)?,
                None if json => explain_json(&set.explain()),
                None => format!("{origin}{}", explain_table(&set.explain())),
            };
            say!("{}", text.trim_end());
            Ok(0)
        }
    }
}
