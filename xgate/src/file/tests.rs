use super::*;
use crate::{Kind, Table};
use proptest::prelude::*;

const FULL: &str = r#"
version = 1
[memory]
limit = "256M"
[cpu]
count = 2
weight = 50
[disk]
size = "1G"
[processes]
max = 512
[time]
deadline = "60s"
[fuel]
instructions = 1000
[clock]
[random]
[stdio]
[network]
connect = ["example.org:443", "10.0.0.0/8:80-90"]
listen = ["8080"]
resolve = ["*.example.org"]
[device]
names = ["gpu"]
[spawn]
max = 4
[[folder]]
host = "./src"
guest = "/src"
rights = ["read"]
[[folder]]
host = "/data"
guest = "/data"
rights = ["read", "write", "exec"]
[[model]]
name = "digits"
file = "models/digits.onnx"
"#;

fn parse(text: &str) -> Result<CapabilitySet, CapsError> {
    read(text, Path::new("/base"))
}

/// The error of a file that is right but for `body`.
fn error(body: &str) -> String {
    parse(&format!("version = 1\n{body}")).expect_err(body).to_string()
}

#[test]
fn a_full_file_is_read() {
    let set = parse(FULL).unwrap();
    assert_eq!(set.memory_bytes(), Some(256 << 20));
    assert_eq!((set.vcpus(), set.cpu_weight()), (2, 50));
    assert_eq!((set.disk_bytes(), set.process_max()), (Some(1 << 30), Some(512)));
    assert_eq!((set.deadline(), set.fuel()), (Some(Duration::from_secs(60)), Some(1000)));
    assert_eq!((set.clock(), set.random(), set.stdio(), set.spawn_max()), (true, true, true, 4));
    assert_eq!(set.devices().collect::<Vec<_>>(), ["gpu"]);
    assert_eq!(set.folders()[0].host, Path::new("/base/src"));
    assert_eq!(set.folders()[0].rights, Rights::READ);
    assert_eq!(set.folders()[1].rights, Rights::READ | Rights::WRITE | Rights::EXECUTE);
    assert_eq!(set.models()[0].file, Path::new("/base/models/digits.onnx"));
    for kind in Kind::ALL {
        assert!(set.grants(*kind), "{kind}");
    }
}

#[test]
fn a_file_survives_writing_and_reading() {
    for set in [parse(FULL).unwrap(), CapabilitySet::default(), CapabilitySet::nothing()] {
        assert_eq!(parse(&write(&set)), Ok(set));
    }
}

#[test]
fn what_is_absent_is_denied() {
    let set = parse("version = 1").unwrap();
    assert_eq!(set, CapabilitySet::nothing());
    for kind in Kind::ALL {
        assert!(!set.grants(*kind), "{kind}");
    }
    assert!(set.require_memory_bytes().unwrap_err().to_string().contains("[memory]"));
    assert!(set.require_cpu().is_err() && set.require_process_max().is_err());
}

#[test]
fn empty_lists_grant_nothing() {
    let set = parse("version = 1\n[network]\nconnect = []\n[device]\nnames = []").unwrap();
    assert_eq!(set.network().unwrap().rights(), Rights::empty());
    assert_eq!(set.devices().count(), 0);
}

#[test]
fn errors_name_the_line() {
    for (body, line, word) in [
        ("[memory]\nlimit = \"256Q\"", 3, "256M"),
        ("[memory]\nlimit = 256", 3, "string"),
        ("[memry]\nlimit = \"1M\"", 2, "memry"),
        ("[memory]\nlimit = \"1M\"\nswap = \"1M\"", 4, "swap"),
        ("[time]\ndeadline = \"soon\"", 3, "30s"),
        ("[network]\nconnect = [\"example.org\"]", 3, "HOST:PORTS"),
        ("[clock\n", 2, ""),
        ("[clock]\n[clock]", 3, "duplicate"),
    ] {
        let error = error(body);
        assert!(error.starts_with(&format!("capability file, line {line}: ")), "{body}: {error}");
        assert!(error.contains(word), "{body}: {error}");
    }
    let json = parse("{\"version\": 1,\n\"memory\": {\"limit\": \"x\"}}").unwrap_err().to_string();
    assert!(json.starts_with("capability file, line 2: `x` is not a size"), "{json}");
}

#[test]
fn errors_name_the_key() {
    let folder = |guest: &str, rights: &str| {
        format!("[[folder]]\nhost = \"/h\"\nguest = \"{guest}\"\nrights = [{rights}]\n")
    };
    let twice = folder("/a", "\"read\"").repeat(2);
    for (body, words) in [
        ("[memory]\nlimit = \"0\"", "memory.limit: must be more than 0"),
        ("[cpu]\ncount = 0", "cpu.count: must lie between 1 and 64"),
        ("[cpu]\nweight = 10001", "cpu.weight: must lie between 1 and 10000"),
        ("[processes]\nmax = 0", "processes.max: must be more than 0"),
        ("[time]\ndeadline = \"0s\"", "time.deadline: must be more than 0"),
        (&folder("a", "\"read\""), "absolute guest path"),
        (&folder("/a/../b", "\"read\""), "absolute guest path"),
        (&folder("/a", "\"write\""), "needs the right `read`"),
        (&folder("/a", ""), "needs the right `read`"),
        (&twice, "two folders have the guest path /a"),
        (&"[[model]]\nname = \"a\"\nfile = \"/m\"\n".repeat(2), "two models are called a"),
        ("[[model]]\nname = \"a/b\"\nfile = \"/m\"", "`a/b` is no name"),
    ] {
        let error = error(body);
        assert!(error.contains(words), "{body}: {error}");
    }
}

#[test]
fn a_path_goes_out_of_directories_and_out_of_no_link() {
    let file = |path: &str| {
        let text = format!("version = 1\n[[model]]\nname = \"m\"\nfile = \"{path}\"");
        read(&text, Path::new("/proc")).map(|set| set.models()[0].file.clone())
    };
    for (path, plain) in [
        ("/proc/sys/../absent", "/proc/absent"),
        ("/../proc/./sys/kernel/../../x/y", "/proc/x/y"),
        ("../proc/../x", "/x"),
        ("/proc/self/absent", "/proc/self/absent"),
    ] {
        assert_eq!(file(path).unwrap(), Path::new(plain), "{path}");
    }
    // A link, a file, and nothing.
    for path in ["/proc/self/../x", "/proc/version/../x", "/proc/absent/../x"] {
        file(path).unwrap_err();
    }
}

#[test]
fn other_versions_and_long_files_are_refused() {
    assert_eq!(parse("version = 2"), Err(CapsError::Version { found: 2 }));
    assert!(parse("").unwrap_err().to_string().contains("version"));
    let long = format!("version = 1\n{}", "#".repeat(FILE_BYTES_MAX));
    assert!(matches!(parse(&long), Err(CapsError::TooLong { .. })));
    let many = "[[folder]]\nhost = \"/h\"\nguest = \"/g\"\nrights = [\"read\"]\n".repeat(257);
    assert!(error(&many).contains("folder: has 257 entries; the limit is 256"));
}

#[test]
fn installing_is_all_or_nothing() {
    let set = parse(FULL).unwrap();
    let mut table = Table::new(64);
    let handles = set.install(&mut table, "cell").unwrap();
    assert_eq!(handles.len(), table.len());
    let folder = table.find("cell", "folder:/src").expect("it is there");
    assert_eq!(table.get(folder).unwrap().kind(), Kind::Folder);
    let mut small = Table::new(5);
    assert!(set.install(&mut small, "cell").is_err());
    assert!(small.is_empty());
}

proptest! {
    #[test]
    fn no_text_panics(text: String) {
        let _ = parse(&text);
        let _ = parse(&format!("{{{text}"));
    }

    /// A valid file with one piece cut out or replaced.
    #[test]
    fn no_damaged_file_panics(start in 0..FULL.len(), length in 0usize..40, with in "[\\[\\]{}=\"a-z0-9.\n]{0,8}") {
        let end = (start + length).min(FULL.len());
        let damaged = [&FULL[..start], with.as_str(), &FULL[end..]].concat();
        if let Ok(set) = parse(&damaged) {
            prop_assert_eq!(parse(&write(&set)), Ok(set));
        }
    }
}
