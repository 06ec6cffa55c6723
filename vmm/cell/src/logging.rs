//! What Exocell says of its own work, beside what commands print: lines for people, or JSON.
//!
//! ```text
//! a command, a server ──> standard error (the journal has a priority before each line)
//!      └─ fork: a cell's supervisor ──> supervisor.log in the cell's record, a MiB at most
//! ```
//! The supervisor's log begins at `info`, whatever its command was told: a start that was slow and
//! an end that nobody wanted are looked into afterwards.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use exocell_agent::printable;
use exocell_images::private;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::time::SystemTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;

pub use tracing;
pub use tracing::level_filters::LevelFilter;

/// The supervisor's file in its cell's record.
pub const FILE: &str = "supervisor.log";
/// Variables that have the settings for commands that this one starts.
pub const LEVEL_VARIABLE: &str = "EXOCELL_LOG_LEVEL";
pub const FORMAT_VARIABLE: &str = "EXOCELL_LOG_FORMAT";
/// Bytes of the supervisor's file; what comes then is not written.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// What systemd(1) names the journal's stream by: `DEVICE:INODE`.
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

/// The form of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `TIME LEVEL SPANS: message field=value`.
    Text,
    /// An object a line, with the same under names.
    Json,
}

impl FromStr for Style {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("`{other}` is no log format; text and json are")),
        }
    }
}

impl Style {
    fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// What is said, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The least that standard error is told.
    pub level: LevelFilter,
    pub style: Style,
}

impl Default for Settings {
    fn default() -> Self {
        Self { level: LevelFilter::WARN, style: Style::Text }
    }
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();
static SINK: Mutex<Sink> = Mutex::new(Sink::Stderr);

/// Where lines go.
enum Sink {
    Stderr,
    File { file: File, room: u64 },
}

/// Begins: from here on events are told. To be called once, by a process with one thread.
pub fn begin(settings: Settings) {
    if SETTINGS.set(settings).is_err() {
        return;
    }
    // Other crates' words are for whoever debugs those.
    let filter = Targets::new()
        .with_target("exocell", settings.level.max(LevelFilter::INFO))
        .with_default(settings.level.min(LevelFilter::WARN));
    let layer = tracing_subscriber::fmt::layer().with_writer(Outlet).with_ansi(false);
    let begun = match settings.style {
        Style::Json => {
            let layer = layer.json().flatten_event(true).with_current_span(true);
            tracing::subscriber::set_global_default(
                tracing_subscriber::registry()
                    .with(layer.with_span_list(false).with_filter(filter)),
            )
        }
        Style::Text => {
            let layer = layer.event_format(Lines { in_journal: is_journal() });
            tracing::subscriber::set_global_default(
                tracing_subscriber::registry().with(layer.with_filter(filter)),
            )
        }
    };
    // There is none before the first.
    let _ = begun;
}

/// The settings for a command that this process starts.
pub fn environment() -> impl Iterator<Item = (&'static str, String)> {
    let settings = SETTINGS.get().copied().unwrap_or_default();
    let level = settings.level.to_string();
    [(LEVEL_VARIABLE, level), (FORMAT_VARIABLE, settings.style.name().to_owned())].into_iter()
}

/// Whether standard error is the journal's (systemd.exec(5), `JOURNAL_STREAM`).
fn is_journal() -> bool {
    let named = std::env::var_os(JOURNAL_VARIABLE);
    let own = File::open("/proc/self/fd/2").and_then(|file| file.metadata());
    let own = own.map(|own| format!("{}:{}", own.dev(), own.ino()));
    !io::stderr().is_terminal()
        && own.is_ok_and(|own| named.as_deref() == Some(OsStr::new(own.as_str())))
}

/// From here on this process, which has one thread, says all to [`FILE`] in its working directory.
///
/// # Errors
/// The file cannot be made; then nothing more is said.
pub(crate) fn move_to_file() -> io::Result<()> {
    let file = private::options().create(true).append(true).open(FILE);
    let room = |file: &File| Ok(FILE_BYTES_MAX.saturating_sub(file.metadata()?.len()));
    let opened = file.and_then(|file| room(&file).map(|room| (file, room)));
    let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
    match opened {
        Ok((file, room)) => {
            *sink = Sink::File { file, room };
            Ok(())
        }
        Err(error) => {
            let null = File::options().write(true).open("/dev/null")?;
            *sink = Sink::File { file: null, room: 0 };
            Err(error)
        }
    }
}

/// Makes the writer of one event.
struct Outlet;

/// Takes one event, which comes in one piece.
enum Line {
    Nowhere,
    Sink,
}

impl<'a> MakeWriter<'a> for Outlet {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line::Sink
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        let is_file =
            matches!(*SINK.lock().unwrap_or_else(PoisonError::into_inner), Sink::File { .. });
        let told = SETTINGS.get().copied().unwrap_or_default().level;
        match is_file || *metadata.level() <= told {
            true => Line::Sink,
            false => Line::Nowhere,
        }
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Self::Sink = self {
            let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *sink {
                Sink::Stderr => io::stderr().write_all(bytes)?,
                Sink::File { file, room } if *room >= bytes.len() as u64 => {
                    *room -= bytes.len() as u64;
                    file.write_all(bytes)?;
                }
                Sink::File { .. } => {}
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines for people. What a guest or a client chose is printable in them.
struct Lines {
    in_journal: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        let format = Format::<Full, SystemTime>::default().with_ansi(false).with_target(false);
        match self.in_journal {
            true => {
                let line = Writer::new(&mut text);
                format.without_time().with_level(false).format_event(context, line, event)?;
                write!(writer, "<{}>", priority(*event.metadata().level()))?;
            }
            false => format.format_event(context, Writer::new(&mut text), event)?,
        }
        writeln!(writer, "{}", printable(text.trim_end()))
    }
}

/// The priority of syslog(3) that the journal reads at a line's head (sd-daemon(3)).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Tells how long each step of some work took, in microseconds, at `debug`.
pub(crate) struct Steps {
    since: Instant,
}

impl Steps {
    pub fn begin() -> Self {
        Self { since: Instant::now() }
    }

    /// What was begun after the step before is done.
    pub fn done(&mut self, step: &'static str) {
        let now = Instant::now();
        let took_us = now.duration_since(self.since).as_micros() as u64;
        tracing::debug!(took_us, "{step}");
        self.since = now;
    }
}
