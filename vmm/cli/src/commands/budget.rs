//! `exocell budget`: the memory that all `vm` cells have together.

use exocell_cell::images::private;
use exocell_cell::pager::Standing;
use exocell_cell::{CellError, Layout, Record, State, Strength};
use serde::Serialize;

use super::print_json;
use crate::args::BudgetArgs;
use crate::show::{self, say};

#[derive(Serialize)]
struct Shown {
    /// `null`: there is none.
    budget_bytes: Option<u64>,
    guaranteed_bytes: u64,
    granted_bytes: u64,
    left_bytes: Option<u64>,
    /// What the cells' processes may take of the host besides, where it bounds that.
    beside_bytes_max: u64,
    cell_count: usize,
    /// Cells that ran before there was a budget: they are not held to it.
    uncounted_count: usize,
}

pub fn budget(layout: &Layout, args: &BudgetArgs) -> Result<u8, CellError> {
    let path = layout.budget();
    let failed = |error: exocell_cell::pager::BudgetError| CellError::Usage(error.to_string());
    let set = |bytes| {
        // It is the operator's alone from its first byte on.
        private::folder(layout.root())
            .and_then(|()| private::options().create(true).append(true).open(&path))
            .map_err(CellError::host(format!("cannot make {}", path.display())))?;
        Standing::set(&path, bytes).map_err(failed)
    };
    match args.size.as_deref() {
        None => {}
        Some("off") => set(u64::MAX)?,
        Some(size) => set(exocell_cell::xgate::parse_bytes(size)
            .map_err(|error| CellError::Usage(format!("{error}; or say off")))?)?,
    }
    let standing = Standing::read(&path).map_err(failed)?;
    let cells = Record::all(layout)?.into_iter();
    let running = cells.filter(|(_, spec, status)| {
        spec.strength == Strength::Vm
            && status.guest_kernel_inner_pid != 0
            && status.state != State::Exited
    });
    show(&shown(standing, running.count()), args.json)
}

fn shown(standing: Option<Standing>, running: usize) -> Shown {
    let standing = standing.unwrap_or(Standing { budget: u64::MAX, shares: Vec::new() });
    let bound = (standing.budget != u64::MAX).then_some(standing.budget);
    Shown {
        budget_bytes: bound,
        guaranteed_bytes: standing.shares.iter().map(|share| share.guarantee).sum(),
        granted_bytes: standing.shares.iter().map(|share| share.granted).sum(),
        left_bytes: bound.map(|_| standing.left()),
        beside_bytes_max: standing.shares.iter().map(|share| share.beside).sum(),
        cell_count: standing.shares.len(),
        // Without a budget nobody is held to one.
        uncounted_count: bound.map_or(0, |_| running.saturating_sub(standing.shares.len())),
    }
}

fn show(shown: &Shown, json: bool) -> Result<u8, CellError> {
    if json {
        print_json(shown, false)?;
        return Ok(0);
    }
    let or_none = |bytes: Option<u64>| bytes.map_or_else(|| "none".to_owned(), show::bytes);
    say!(
        "budget {}, guaranteed {}, granted {}, left {}, cells {}, beside it at most {}",
        or_none(shown.budget_bytes),
        show::bytes(shown.guaranteed_bytes),
        show::bytes(shown.granted_bytes),
        or_none(shown.left_bytes),
        shown.cell_count,
        show::bytes(shown.beside_bytes_max)
    );
    if shown.uncounted_count > 0 {
        say!(
            "{} cells ran before there was a budget and are not counted; exocell restart has them \
             counted",
            shown.uncounted_count
        );
    }
    Ok(0)
}
