//! Whether the host is short of memory.
//!
//! A host whose programs wait for memory says so (pressure stall information,
//! Documentation/accounting/psi.rst of the kernel). A control group at a limit of its
//! own waits too, so that counts only where a good part of all memory is in use. Where
//! there is no such information, and before anyone waits, little memory that is
//! available tells.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::time::{Duration, Instant};

/// The share of the time that some program may wait for memory.
const WAIT_MAX: f64 = 0.05;
/// With so much of all memory available nobody waits for the host's sake.
const AVAILABLE_ENOUGH: f64 = 0.5;
/// With less there is too little, whoever waits.
const AVAILABLE_MIN: f64 = 1.0 / 16.0;

/// The host's own figures, of files that stay open, for who can open none later.
#[derive(Debug)]
pub struct Pressure {
    /// `None`: the host does not count waits.
    waits: Option<File>,
    memory: File,
    /// When it was looked at last, and how long programs had waited until then.
    last: Option<(Instant, Duration)>,
}

impl Pressure {
    /// # Errors
    /// The host does not say how much memory it has.
    pub fn open() -> io::Result<Self> {
        let waits = File::open("/proc/pressure/memory").ok();
        Ok(Self { waits, memory: File::open("/proc/meminfo")?, last: None })
    }

    /// Whether the host was short of memory since it was looked at last. A host that
    /// does not say is not.
    pub fn is_high(&mut self) -> bool {
        let now = Instant::now();
        let total = self.waits.as_mut().and_then(|file| some_total(&read(file)?));
        let waited = self.last.zip(total).map(|((at, before), total)| {
            total.saturating_sub(before).as_secs_f64() / (now - at).as_secs_f64()
        });
        self.last = total.map(|total| (now, total));
        let available = read(&mut self.memory).and_then(|text| available_share(&text));
        available.is_some_and(|available| is_short(waited, available))
    }
}

/// All of a file of proc(5) as it is now.
fn read(file: &mut File) -> Option<String> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    Some(text)
}

/// `waited`: the share of the time that some program waited, where that is known.
fn is_short(waited: Option<f64>, available: f64) -> bool {
    let hurts = waited.is_some_and(|waited| waited > WAIT_MAX) && available < AVAILABLE_ENOUGH;
    hurts || available < AVAILABLE_MIN
}

/// How long some program has waited for memory since the boot.
fn some_total(text: &str) -> Option<Duration> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

/// What could be had without swapping, of all (proc_meminfo(5)).
fn available_share(text: &str) -> Option<f64> {
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line?.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let all = kib("MemTotal").filter(|all| *all > 0)?;
    Some(kib("MemAvailable")? as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_count_where_much_is_in_use_and_little_memory_alone() {
        assert!(!is_short(Some(1.0), 0.6));
        assert!(is_short(Some(0.06), 0.4));
        assert!(!is_short(Some(0.04), 0.4));
        assert!(!is_short(None, 0.07));
        assert!(is_short(None, 0.06));
    }

    #[test]
    fn the_hosts_figures_are_read() {
        let waits =
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=9\n";
        assert_eq!(some_total(waits), Some(Duration::from_millis(2500)));
        assert_eq!(some_total("full avg10=0.00 total=9\n"), None);
        let memory = "MemTotal:  800 kB\nMemFree:  1 kB\nMemAvailable:  200 kB\n";
        assert_eq!(available_share(memory), Some(0.25));
        assert_eq!(available_share("MemTotal: 0 kB\nMemAvailable: 0 kB\n"), None);
        assert_eq!(available_share(""), None);
    }

    #[test]
    fn waits_are_those_since_the_last_look() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            File::open(path).unwrap()
        };
        let waits = |total: u64| put("waits", &format!("some avg10=9.00 total={total}\n"));
        let memory = put("memory", "MemTotal: 100 kB\nMemAvailable: 40 kB\n");
        let mut host = Pressure { waits: Some(waits(1 << 40)), memory, last: None };
        assert!(!host.is_high(), "whatever was before");
        waits((1 << 40) + 3_600_000_000);
        assert!(host.is_high());
        std::thread::sleep(Duration::from_millis(1));
        assert!(!host.is_high());
        put("memory", "MemTotal: 100 kB\nMemAvailable: 5 kB\n");
        assert!(host.is_high());
        put("memory", "");
        assert!(!host.is_high());
    }

    #[test]
    fn this_host_says_how_it_stands() {
        let mut host = Pressure::open().unwrap();
        assert!(read(&mut host.memory).and_then(|text| available_share(&text)).is_some());
        host.is_high();
    }
}
