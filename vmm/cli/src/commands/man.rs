//! `exocell man`: the command reference, as man pages or as the book's chapter.

use exocell_cell::granted::Links;
use exocell_cell::{CellError, Layout};

use crate::args::{ManArgs, command};
use crate::reference;
use crate::show::say;

pub fn man(layout: &Layout, args: &ManArgs) -> Result<u8, CellError> {
    if let Some(dir) = &args.dir {
        let failed = || format!("cannot write man pages into {}", dir.display());
        let dir = Links::outside(layout).own(dir).map_err(CellError::host(failed()))?;
        clap_mangen::generate_to(command(), dir).map_err(CellError::host(failed()))?;
    }
    if args.markdown {
        say!("{}", reference::markdown(command()).trim_end());
    }
    Ok(0)
}
