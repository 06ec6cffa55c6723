//! What happened, for `GET /events`: told as it happens, and kept for a while.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::caller::Caller;
use crate::error::{ApiError, ApiResult};
use crate::filters::Filters;
use crate::http::{Body, BodySender, Call, Response, stream};

/// Events that are kept for those who ask for the past.
const KEPT_MAX: usize = 1024;
/// What they may hold together, in bytes.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// What `filters` may name.
const FILTERS: [&str; 7] = ["container", "event", "image", "label", "type", "volume", "scope"];

/// One event, in the API's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    status: String,
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(rename = "Type")]
    kind: &'static str,
    #[serde(rename = "Action")]
    action: String,
    #[serde(rename = "Actor")]
    actor: Actor,
    scope: &'static str,
    /// Seconds since 1970.
    time: u64,
    #[serde(rename = "timeNano")]
    time_nano: u64,
    /// Who had the container made, and its own id.
    #[serde(skip)]
    line: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Actor {
    #[serde(rename = "ID")]
    id: String,
    #[serde(rename = "Attributes")]
    attributes: BTreeMap<String, String>,
}

impl Event {
    pub fn new(
        kind: &'static str,
        action: impl Into<String>,
        id: &str,
        attributes: BTreeMap<String, String>,
    ) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let action = action.into();
        Self {
            status: action.clone(),
            id: id.to_owned(),
            from: attributes.get("image").cloned(),
            kind,
            action,
            actor: Actor { id: id.to_owned(), attributes },
            scope: "local",
            time: now.as_secs(),
            time_nano: now.as_nanos() as u64,
            line: Vec::new(),
        }
    }

    /// The same of a container that those in `made_by` had made: it is for them, too.
    pub fn of_container(self, made_by: &[String]) -> Self {
        let line = made_by.iter().chain([&self.id]).cloned().collect();
        Self { line, ..self }
    }

    /// What it holds of the words of clients.
    fn bytes(&self) -> usize {
        let attributes = self.actor.attributes.iter();
        let attributes: usize = attributes.map(|(name, value)| name.len() + value.len()).sum();
        attributes + 2 * self.action.len() + 2 * self.id.len() + size_of::<Self>()
    }

    fn passes(&self, filters: &Filters) -> bool {
        let attributes = &self.actor.attributes;
        let named = |kind: &str, wanted: &str| {
            self.kind == kind
                && (self.id.starts_with(wanted)
                    || attributes.get("name").is_some_and(|name| name == wanted))
        };
        // `exec_start: COMMAND` is asked for as `exec_start`.
        let action = self.action.split(':').next().unwrap_or_default();
        filters.any("event", |wanted| wanted == action || wanted == self.action)
            && filters.any("type", |wanted| wanted == self.kind)
            && filters.any("scope", |wanted| wanted == self.scope)
            && filters.any("container", |wanted| named("container", wanted))
            && filters.any("volume", |wanted| named("volume", wanted))
            && filters.any("image", |wanted| {
                named("image", wanted) || self.from.as_deref() == Some(wanted)
            })
            && filters.labels(attributes)
    }
}

/// The newest events, oldest first.
#[derive(Default)]
struct Kept {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
}

impl Kept {
    fn keep(&mut self, event: Arc<Event>) {
        self.bytes += event.bytes();
        self.events.push_back(event);
        while self.events.len() > KEPT_MAX || self.bytes > KEPT_BYTES_MAX {
            let Some(oldest) = self.events.pop_front() else { return };
            self.bytes -= oldest.bytes();
        }
    }
}

/// Where events are told and heard.
pub struct Events {
    told: broadcast::Sender<Arc<Event>>,
    kept: Mutex<Kept>,
}

impl Default for Events {
    fn default() -> Self {
        Self { told: broadcast::channel(KEPT_MAX).0, kept: Mutex::default() }
    }
}

impl Events {
    pub fn tell(&self, event: Event) {
        let event = Arc::new(event);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.keep(event.clone());
        // Told under the lock, so that a listener misses none and hears none
        // twice. Nobody may listen.
        let _ = self.told.send(event);
    }

    fn listen(&self) -> (Vec<Arc<Event>>, broadcast::Receiver<Arc<Event>>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.events.iter().cloned().collect(), self.told.subscribe())
    }

    /// `GET /events`
    pub fn serve(self: &Arc<Self>, call: &Call) -> ApiResult<Response> {
        let query = &call.target.query;
        let filters = (Filters::of(query, &FILTERS)?, call.caller.clone());
        let time = |name| query.get(name).map(time_ns).transpose();
        let (since, until) = (time("since")?, time("until")?);
        let (kept, told) = self.listen();
        let past = kept.into_iter().filter(move |event| {
            since.is_some_and(|since| event.time_nano >= since)
                && until.is_none_or(|until| event.time_nano <= until)
        });
        let past: Vec<_> = past.collect();
        let (sender, body) = Body::stream();
        tokio::spawn(follow(sender, filters, past, told, until));
        Ok(stream("application/json", body))
    }
}

async fn follow(
    sender: BodySender,
    (filters, caller): (Filters, Caller),
    past: Vec<Arc<Event>>,
    mut told: broadcast::Receiver<Arc<Event>>,
    until_ns: Option<u64>,
) {
    let passes = |event: &Event| caller.has_made(&event.line) && event.passes(&filters);
    for event in past.iter().filter(|event| passes(event)) {
        if !sender.line(&**event).await {
            return;
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let end = until_ns.map(|until| {
        Instant::now() + Duration::from_nanos(until.saturating_sub(now.as_nanos() as u64))
    });
    let over = async {
        match end {
            Some(end) => tokio::time::sleep_until(end).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(over);
    loop {
        let event = tokio::select! {
            event = told.recv() => event,
            () = sender.closed() => return,
            () = &mut over => return,
        };
        match event {
            Ok(event) if passes(&event) => {
                if !sender.line(&*event).await {
                    return;
                }
            }
            // A client that does not keep up misses the oldest.
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Seconds since 1970, with or without a fraction, in nanoseconds.
///
/// # Errors
/// 400 for anything else.
pub fn time_ns(text: &str) -> ApiResult<u64> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = seconds.parse::<u64>().ok().filter(|_| digits(fraction) && fraction.len() <= 9);
    let parsed = parsed.and_then(|seconds| {
        let fraction = format!("{fraction:0<9}").parse::<u64>().ok()?;
        seconds.checked_mul(1_000_000_000)?.checked_add(fraction)
    });
    parsed.ok_or_else(|| {
        ApiError::bad_request(format!("{text:?} is no time; give seconds since 1970"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_to_the_nanosecond() {
        assert_eq!(time_ns("12").unwrap(), 12_000_000_000);
        assert_eq!(time_ns("12.5").unwrap(), 12_500_000_000);
        assert_eq!(time_ns("1.000000001").unwrap(), 1_000_000_001);
        for bad in ["", "x", "-1", "1.x", "1.0000000001", "99999999999999999999", "1.-5"] {
            assert!(time_ns(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_past_is_bounded_in_number_and_in_bytes() {
        let mut kept = Kept::default();
        let event = |label: usize| {
            let attributes = BTreeMap::from([("label".to_owned(), "x".repeat(label))]);
            Arc::new(Event::new("container", "start", "abc", attributes))
        };
        for _ in 0..2 * KEPT_MAX {
            kept.keep(event(1));
        }
        assert_eq!(kept.events.len(), KEPT_MAX);
        for _ in 0..150 {
            kept.keep(event(1 << 20));
        }
        assert_eq!(kept.events.len(), 3);
        kept.keep(event(2 * KEPT_BYTES_MAX));
        assert_eq!((kept.events.len(), kept.bytes), (0, 0));
        kept.keep(event(1));
        assert_eq!(kept.events.len(), 1);
    }

    #[test]
    fn events_pass_by_type_name_action_and_label() {
        let attributes = [("image", "i"), ("name", "n"), ("k", "v")];
        let attributes = attributes.map(|(k, v)| (k.to_owned(), v.to_owned()));
        let event = Event::new("container", "exec_start: true", "abc", attributes.into());
        let passes = |text: &str| event.passes(&Filters::parse(text, &FILTERS).unwrap());
        for text in [
            r#"{"event":["exec_start"]}"#,
            r#"{"type":["image","container"]}"#,
            r#"{"container":["n"],"image":["i"]}"#,
            r#"{"container":["ab"],"label":["k=v"]}"#,
        ] {
            assert!(passes(text), "{text}");
        }
        for text in [
            r#"{"event":["die"]}"#,
            r#"{"container":["x"]}"#,
            r#"{"label":["k=w"]}"#,
            r#"{"volume":["n"]}"#,
        ] {
            assert!(!passes(text), "{text}");
        }
    }
}
