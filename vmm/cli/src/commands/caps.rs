//! `exocell caps`: is this table right, and what does it allow?

use std::path::Path;

use exocell_cell::agent::{printable, printable_lines};
use exocell_cell::parent::Parent;
use exocell_cell::xgate::{CapabilitySet, explain_json, explain_table};
use exocell_cell::{CellError, Layout, plan};

use super::{explain, run::read_table};
use crate::args::CapsCommand;
use crate::show::say;

/// The table to explain, and in a `vm` cell a line that says which that is.
fn table_of(layout: &Layout, file: Option<&Path>) -> Result<(CapabilitySet, String), CellError> {
    let read = |file| read_table(layout, file);
    let Some(parent) = Parent::find()? else {
        return Ok((file.map_or_else(|| Ok(CapabilitySet::default()), read)?, String::new()));
    };
    let cells = format!("the table of this cell, {}", Parent::TABLE);
    Ok(match file {
        None => (parent.most, format!("{cells}: isolates in it have at most this\n\n")),
        Some(file) => {
            let own = read(file)?.within(&parent.most)?;
            (own, format!("{}, within {cells}\n\n", file.display()))
        }
    })
}

pub fn caps(layout: &Layout, command: CapsCommand) -> Result<u8, CellError> {
    match command {
        CapsCommand::Check { file } => match read_table(layout, &file) {
            Ok(_) => {
                say!("{}: ok", printable(&file.display().to_string()));
                Ok(0)
            }
            Err(error) => {
                crate::show::complain(&error);
                Ok(1)
            }
        },
        CapsCommand::Explain { file, caps, json } => {
            let module = file.as_deref().filter(|path| plan::is_module(path));
            let table = if module.is_some() { caps } else { file.clone().or(caps) };
            let (set, origin) = table_of(layout, table.as_deref())?;
            let text = match module {
                Some(path) => explain::module(layout, path, &set, json)?,
                None if json => explain_json(&set.explain()),
                None => format!("{origin}{}", explain_table(&set.explain())),
            };
            // JSON stays the same JSON.
            say!("{}", printable_lines(text.trim_end()));
            Ok(0)
        }
    }
}
