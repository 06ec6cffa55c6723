use super::*;
use proptest::prelude::*;

fn flags(list: &[(&str, &str)]) -> Flags {
    let mut flags = Flags::default();
    for (name, text) in list {
        flags.add(&format!("--{name}"), name, text, Path::new("/base")).expect(text);
    }
    flags
}

fn refusal(name: &str, text: &str) -> String {
    let mut flags = Flags::default();
    let error = flags.add(&format!("--{name}"), name, text, Path::new("/base"));
    error.expect_err(text).to_string()
}

const FILE: &str = r#"
version = 1
[memory]
limit = "256M"
[cpu]
count = 2
[time]
deadline = "60s"
[stdio]
[network]
connect = ["*.example.org:443"]
[[folder]]
host = "/data"
guest = "/data"
rights = ["read"]
"#;

fn narrowed(list: &[(&str, &str)]) -> Result<CapabilitySet, CapsError> {
    CapabilitySet::parse(FILE, Path::new("/")).unwrap().narrowed(&flags(list))
}

#[test]
fn without_flags_the_default_is_granted() {
    assert_eq!(CapabilitySet::from_flags(&Flags::default()), Ok(CapabilitySet::default()));
}

#[test]
fn flags_alone_are_the_grant() {
    let list = [
        ("memory", "64M"),
        ("cpus", "2.0"),
        ("time", "5s"),
        ("folder", "./src:/src:ro"),
        ("folder", "/data:/data"),
        ("connect", "example.org:443"),
        ("device", "gpu"),
    ];
    let set = CapabilitySet::from_flags(&flags(&list)).unwrap();
    assert_eq!((set.memory_bytes(), set.vcpus()), (Some(64 << 20), 2));
    assert_eq!(set.folders()[0].host, Path::new("/base/src"));
    assert_eq!(set.folders()[0].rights, Rights::READ | Rights::EXECUTE);
    assert_eq!(set.folders()[1].rights, Rights::READ | Rights::WRITE | Rights::EXECUTE);
    assert_eq!(set.network().unwrap().rights(), Rights::CONNECT);
    assert_eq!(set.devices().collect::<Vec<_>>(), ["gpu"]);
}

#[test]
fn pairs_are_flags_too() {
    let mut flags = Flags::default();
    flags.add_pair("--grant", "memory=64M", Path::new("/")).unwrap();
    flags.add_pair("--grant", "clock", Path::new("/")).unwrap();
    assert_eq!(CapabilitySet::from_flags(&flags).unwrap().memory_bytes(), Some(64 << 20));
    let error = flags.add_pair("--grant", "memry=64M", Path::new("/")).unwrap_err().to_string();
    assert!(
        error.starts_with("--grant memry: `memry` is not a capability; known are memory"),
        "{error}"
    );
}

#[test]
fn malformed_flags_are_named() {
    for (name, text, words) in [
        ("memory", "much", "like \"256M\""),
        ("cpus", "0.5", "whole vCPUs"),
        ("cpus", "-1", "whole vCPUs"),
        ("time", "1d", "like \"30s\""),
        ("clock", "yes", "takes no value"),
        ("device", "", "names no device"),
        ("folder", "/a", "HOST:GUEST"),
        ("folder", "/a:/b:ro:x", "HOST:GUEST"),
        ("folder", "cache:/b", "neither a path nor the name of a volume; write ./cache"),
        ("folder", "/a:b", "absolute guest path"),
        ("folder", "/a:/b:rx", "not one of ro, rw"),
    ] {
        let error = refusal(name, text);
        assert!(error.starts_with(&format!("--{name}: ")) && error.contains(words), "{error}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for (name, text) in [("memory", "0"), ("cpus", "65"), ("weight", "0"), ("processes", "0")] {
        assert!(CapabilitySet::from_flags(&flags(&[(name, text)])).is_err(), "{name}={text}");
    }
}

#[test]
fn flags_narrow_a_file() {
    let list = [
        ("memory", "64M"),
        ("time", "5s"),
        ("stdio", ""),
        ("connect", "a.example.org:443"),
        ("folder", "/data/sub:/sub:ro"),
    ];
    let set = narrowed(&list).unwrap();
    assert_eq!(
        (set.memory_bytes(), set.deadline()),
        (Some(64 << 20), Some(Duration::from_secs(5)))
    );
    assert_eq!(set.folders().len(), 2);
    // The flag did not ask for `execute`, and the file does not grant it.
    assert_eq!(set.folders()[1].rights, Rights::READ);
    assert!(!set.clock() && set.disk_bytes().is_none());
}

#[test]
fn flags_do_not_widen_a_file() {
    for (name, text, capability) in [
        ("memory", "257M", "memory"),
        ("cpus", "3", "cpu"),
        ("weight", "101", "cpu"),
        ("disk", "1M", "disk"),
        ("processes", "1", "processes"),
        ("time", "61s", "time"),
        ("clock", "", "clock"),
        ("random", "", "random"),
        ("spawn", "1", "spawn"),
        ("device", "gpu", "device"),
        ("connect", "example.org:443", "network"),
        ("connect", "a.example.org:80", "network"),
        ("listen", "80", "network"),
        ("resolve", "a.example.org", "network"),
        ("join", "backend", "network"),
        ("folder", "/data:/data:rw", "folder"),
        ("folder", "/data:/data:ro,exec", "folder"),
        ("folder", "/database:/data:ro", "folder"),
        ("folder", "/:/data:ro", "folder"),
    ] {
        let error = narrowed(&[(name, text)]).expect_err(text);
        match &error {
            CapsError::Exceeds { flag, capability: found, .. } => {
                assert_eq!(
                    (flag.as_str(), found.as_str()),
                    (format!("--{name}").as_str(), capability)
                );
            }
            other => panic!("{name}={text}: {other}"),
        }
    }
    assert_eq!(
        narrowed(&[("memory", "1G")]).unwrap_err().to_string(),
        "--memory asks for 1G, but the capability file grants 256M (memory); flags can only narrow it"
    );
}

#[test]
fn a_file_without_a_deadline_can_be_given_one() {
    let file = CapabilitySet::parse("version = 1", Path::new("/")).unwrap();
    let set = file.narrowed(&flags(&[("time", "5s"), ("fuel", "9")])).unwrap();
    assert_eq!((set.deadline(), set.fuel()), (Some(Duration::from_secs(5)), Some(9)));
}

proptest! {
    #[test]
    fn no_flag_panics(name in prop::sample::select(&Flags::NAMES[..]), text: String) {
        let mut flags = Flags::default();
        if flags.add("--flag", name, &text, Path::new("/base")).is_ok() {
            let _ = CapabilitySet::from_flags(&flags);
            let _ = CapabilitySet::nothing().narrowed(&flags);
        }
    }

    /// Whatever the flags, each capability of the result lies within one of the file.
    #[test]
    fn narrowing_never_grows(memory in 1u64..512, cpus in 1u32..4, guest in "/[a-c]", host in "/(data|data/x|other)", mode in "ro|rw") {
        let (memory, cpus, folder) = (format!("{memory}M"), cpus.to_string(), format!("{host}:{guest}:{mode}"));
        let file = CapabilitySet::parse(FILE, Path::new("/")).unwrap();
        if let Ok(set) = narrowed(&[("memory", &memory), ("cpus", &cpus), ("folder", &folder)]) {
            for capability in set.capabilities("") {
                let within = file.capabilities("").iter().any(|own| {
                    own.kind() == capability.kind()
                        && own.rights().contains(capability.rights())
                        && own.scope().contains(capability.scope())
                        && own.quota() >= capability.quota()
                });
                prop_assert!(within, "{capability:?}");
            }
        }
    }
}
