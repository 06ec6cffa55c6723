//! A page for the operator of a host: the cells as they live, what their networks were let do,
//! their logs, a terminal in each, and the end of those that are to end.
//!
//! ```text
//! browser ──> serve ─> gate (host, origin, key) ─> route ─┬─> page: HTML, a style, two scripts
//!    ^                                                    ├─> watch: one stream of what changes
//!    │                                                    ├─> logs, terminal: a stream each
//!    └── keeps the key for this page alone                └─> act: pause, resume, kill
//!
//! watch ─> cells (events, records, figures in turns), decisions (the networks' logs)
//! ```
//! Read it in this order: [`serve`] -> `gate` -> `route` -> `watch` -> `cells`, `decisions` -> `logs`,
//! `terminal`.
//!
//! What a cell says is hostile, and so are the other pages of the browser. Text of cells is made
//! printable here, goes out as JSON, and the script puts it into the page as text alone. There is no
//! cookie: a browser gives those of a host to every port of it, where programs of cells may listen.
#![forbid(unsafe_code)]

mod cells;
mod decisions;
mod error;
mod gate;
mod logs;
mod page;
mod reply;
mod route;
mod row;
mod serve;
mod terminal;
mod watch;

pub use error::ServeError;
pub use serve::{Key, Options, serve};
