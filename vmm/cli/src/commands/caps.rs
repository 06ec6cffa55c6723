//! `exocell caps`: is this table right, and what does it allow?

use exocell_cell::xgate::{CapabilitySet, explain_json, explain_table};
use exocell_cell::{CellError, plan};

use super::{explain, run::read_table};
use crate::args::CapsCommand;
use crate::show::say;

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
            let set = table.as_deref().map_or_else(|| Ok(CapabilitySet::default()), read_table)?;
            let text = match module {
                Some(path) => explain::module(path, &set, json)?,
                None if json => explain_json(&set.explain()),
                None => explain_table(&set.explain()),
            };
            say!("{}", text.trim_end());
            Ok(0)
        }
    }
}
