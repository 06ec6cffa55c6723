//! Capability tables and the flags that narrow them.

use std::path::Path;

use exocell_xgate::{CapabilitySet, Flags};

/// A table as text. What is accepted must survive being written and read.
pub fn table(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(set) = CapabilitySet::parse(&text, Path::new("/")) else { return };
    assert!(!set.explain().is_empty(), "every kind is explained");
    let again = CapabilitySet::parse(&set.to_json(), Path::new("/")).expect("its own words");
    assert_eq!(again.to_json(), set.to_json(), "what is written reads back");
}

/// One NAME=VALUE a line: each alone on top of nothing, then all of them.
pub fn flags(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut flags = Flags::default();
    for line in text.lines().take(64) {
        if flags.add_pair("--cap", line, Path::new("/")).is_err() {
            continue;
        }
        // Flags may contradict each other; that is an error like any other.
        let _ = CapabilitySet::from_flags(&flags);
        let _ = CapabilitySet::default().narrowed(&flags);
    }
}

pub fn table_seeds() -> Vec<Vec<u8>> {
    let whole = r#"version = 1
[memory]
limit = "256M"
[cpu]
count = 2
weight = 100
[disk]
size = "1G"
[processes]
max = 256
[time]
deadline = "10m"
[clock]
[random]
[stdio]
[[folder]]
host = "/tmp"
guest = "/src"
rights = ["read"]
"#;
    let default = CapabilitySet::default().to_json();
    [whole, "version = 1\n", &default].map(|text| text.as_bytes().to_vec()).to_vec()
}

pub fn flag_seeds() -> Vec<Vec<u8>> {
    let lines = "memory=256m\ncpus=2\ndisk=1g\nprocesses=9\ntime=30s\nfolder=/tmp:/src:ro\nclock\n";
    vec![lines.as_bytes().to_vec(), b"folder=/tmp:/a\nfolder=/tmp:/a:ro".to_vec()]
}
