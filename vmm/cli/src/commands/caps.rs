//! `exocell caps`: is this table right, and what does it allow?

use exocell_cell::CellError;
use exocell_cell::xgate::{CapabilitySet, explain_json, explain_table};

use super::run::read_table;
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
        CapsCommand::Explain { file, json } => {
            let set = file.as_deref().map_or_else(|| Ok(CapabilitySet::default()), read_table)?;
            let rows = set.explain();
            let text = if json { explain_json(&rows) } else { explain_table(&rows) };
            say!("{}", text.trim_end());
            Ok(0)
        }
    }
}
