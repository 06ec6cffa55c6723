//! `exocell events`: what becomes of cells.

use std::thread;
use std::time::Duration;

use exocell_cell::agent::printable;
use exocell_cell::events::{Event, Reader};
use exocell_cell::{CellError, Layout, clock, now_ms};
use exocell_docker::Filters;
use serde_json::{Value, json};

use super::print_json;
use crate::args::EventsArgs;
use crate::format::Template;
use crate::show::say;

/// What events can be filtered by; docker's words among them.
const FILTERS: [&str; 4] = ["cell", "container", "event", "image"];
/// How often the log is looked at.
const PERIOD: Duration = Duration::from_millis(100);

pub fn events(layout: &Layout, args: &EventsArgs) -> Result<u8, CellError> {
    let filters = Filters::of_words(&args.filter, &FILTERS)
        .map_err(|error| CellError::Usage(format!("--filter: {error}")))?;
    let template = args.format.as_deref().map(Template::read).transpose()?;
    let since = time("since", args.since.as_deref())?;
    let until = time("until", args.until.as_deref())?.unwrap_or(u64::MAX);
    let failed = || CellError::host("cannot read the log of events");
    let mut log = Reader::open(layout, since.is_none()).map_err(failed())?;
    loop {
        // What came before the end is there by now.
        let is_over = until <= now_ms();
        while let Some(event) = log.next_event().map_err(failed())? {
            let is_wanted = (since.unwrap_or(0)..=until).contains(&event.time_ms);
            if is_wanted && passes(&filters, &event) {
                show(args, template.as_ref(), &event)?;
            }
        }
        if is_over {
            return Ok(0);
        }
        thread::sleep(PERIOD.min(Duration::from_millis(until.saturating_sub(now_ms()))));
    }
}

fn time(flag: &str, text: Option<&str>) -> Result<Option<u64>, CellError> {
    let time = text.map(|text| clock::parse_ms(text, now_ms())).transpose();
    time.map_err(|error| CellError::Usage(format!("--{flag}: {error}")))
}

fn passes(filters: &Filters, event: &Event) -> bool {
    let is_cell = |key: &str| event.name == key || (!key.is_empty() && event.id.starts_with(key));
    filters.any("cell", is_cell)
        && filters.any("container", is_cell)
        && filters.any("event", |wanted| action(event) == wanted)
        && filters.any("image", |wanted| {
            event.image == wanted || event.image.strip_suffix(":latest") == Some(wanted)
        })
}

fn action(event: &Event) -> Value {
    json!(event.action)
}

fn show(args: &EventsArgs, template: Option<&Template>, event: &Event) -> Result<(), CellError> {
    if args.json {
        return print_json(event, false);
    }
    if let Some(template) = template {
        return template.print(&[whole(event)]);
    }
    let mut about = vec![format!("name={}", event.name), format!("image={}", event.image)];
    about.extend(event.exit_code.map(|code| format!("exit_code={code}")));
    about.extend(event.reason.as_ref().map(|reason| format!("reason={reason}")));
    let (at, action) = (clock::rfc3339_ms(event.time_ms), action(event));
    let action = action.as_str().unwrap_or_default();
    let id = event.id.get(..12).unwrap_or(&event.id);
    say!("{}", printable(&format!("{at} {action} {id} ({})", about.join(", "))));
    Ok(())
}

/// All fields, null where the event has none, so that one template fits all events.
fn whole(event: &Event) -> Value {
    json!({
        "time_ms": event.time_ms, "action": event.action, "id": event.id, "name": event.name,
        "image": event.image, "exit_code": event.exit_code, "reason": event.reason,
        "times": event.times,
    })
}
