use super::*;
use crate::Flags;
use std::path::Path;
use std::time::Duration;

const CELL_TABLE: &str = r#"
version = 1
[memory]
limit = "128M"
[cpu]
count = 1
weight = 50
[processes]
max = 64
[time]
deadline = "60s"
[stdio]
[network]
connect = ["example.org:443"]
[device]
names = ["gpu"]
[spawn]
max = 4
[[folder]]
host = "/host/src"
guest = "/src"
rights = ["read", "exec"]
[[model]]
name = "digits"
file = "/host/digits.onnx"
"#;

fn read(text: &str) -> CapabilitySet {
    CapabilitySet::parse(text, Path::new("/")).expect(text)
}

fn most() -> CapabilitySet {
    handed_on(true)
}

fn handed_on(root_writable: bool) -> CapabilitySet {
    read(CELL_TABLE).handed_on(root_writable, Path::new("/models")).unwrap()
}

/// What an isolate gets that asks for `list` in a cell that hands on `most`.
fn asking(most: &CapabilitySet, list: &[(&str, &str)]) -> Result<CapabilitySet, CapsError> {
    let mut flags = Flags::default();
    for (name, text) in list {
        flags.add(&format!("--{name}"), name, text, Path::new("/")).expect(text);
    }
    CapabilitySet::default_within(most).with(&flags)?.within(most)
}

#[test]
fn a_cell_hands_on_its_limits_and_what_it_sees() {
    let most = most();
    assert_eq!((most.memory_bytes(), most.process_max()), (Some(128 << 20), Some(64)));
    assert_eq!((most.stdio(), most.clock(), most.spawn_max()), (true, false, 0));
    assert_eq!(most.network().map(|network| network.connect.len()), Some(1));
    let models: Vec<_> = most.models().iter().map(|own| own.file.to_str()).collect();
    assert_eq!(models, [Some("/models/digits.onnx")]);
    assert_eq!(most.devices().count(), 0);
    let seen: Vec<_> = most.folders().iter().map(|own| (own.host.to_str(), own.rights)).collect();
    assert_eq!(seen, [(Some("/"), Rights::READ | Rights::WRITE), (Some("/src"), Rights::READ),]);
    let read_only = handed_on(false);
    assert_eq!(read_only.folders()[0].rights, Rights::READ);
    assert_eq!(read(&most.to_json()), most, "the guest reads what the host wrote");
}

#[test]
fn an_isolate_that_asks_for_nothing_has_no_folder_and_no_more_than_its_cell() {
    let own = asking(&most(), &[]).unwrap();
    assert_eq!((own.memory_bytes(), own.disk_bytes()), (Some(128 << 20), None));
    assert_eq!((own.cpu_weight(), own.process_max()), (50, Some(64)));
    assert_eq!((own.stdio(), own.clock(), own.random()), (true, false, false));
    assert_eq!(own.deadline(), Some(Duration::from_secs(60)));
    assert!(own.folders().is_empty());
    let large = CapabilitySet { memory_bytes: Some(1 << 40), ..CapabilitySet::default() };
    assert_eq!(asking(&large, &[]).unwrap(), CapabilitySet::default());
}

#[test]
fn an_isolate_of_a_cell_without_a_deadline_may_have_one() {
    let most = CapabilitySet::default().handed_on(true, Path::new("/models")).unwrap();
    let own = asking(&most, &[("time", "5s"), ("fuel", "9")]).unwrap();
    assert_eq!((own.deadline(), own.fuel()), (Some(Duration::from_secs(5)), Some(9)));
}

#[test]
fn an_isolate_may_ask_for_what_its_cell_has() {
    let list = [
        ("memory", "64M"),
        ("time", "5s"),
        ("folder", "/src/lib:/lib:ro"),
        ("folder", "/work:/work:rw"),
        ("connect", "example.org:443"),
    ];
    let own = asking(&most(), &list).unwrap();
    assert_eq!(
        (own.memory_bytes(), own.deadline()),
        (Some(64 << 20), Some(Duration::from_secs(5)))
    );
    let rights: Vec<Rights> = own.folders().iter().map(|folder| folder.rights).collect();
    assert_eq!(rights, [Rights::READ, Rights::READ | Rights::WRITE]);
}

#[test]
fn what_its_cell_reads_can_be_a_model_and_have_a_layer() {
    let most = CapabilitySet { disk_bytes: Some(1 << 20), ..most() };
    for (name, text) in [
        ("model", "digits:/models/digits.onnx"),
        ("model", "other:/src/m.onnx"),
        ("folder", "/src:/here:overlay"),
        ("folder", "/work:/here:overlay"),
    ] {
        asking(&most, &[(name, text)]).expect(text);
    }
    let quiet = CapabilitySet { folders: Vec::new(), ..most };
    asking(&quiet, &[("model", "digits:/models/digits.onnx")]).unwrap();
    asking(&quiet, &[("model", "digits:/src/m.onnx")]).unwrap_err();
}

#[test]
fn an_isolate_does_not_get_more_than_its_cell_has() {
    for (name, text, capability) in [
        ("memory", "129M", "memory"),
        ("cpus", "2", "cpu"),
        ("weight", "51", "cpu"),
        ("disk", "1M", "disk"),
        ("processes", "65", "processes"),
        ("time", "61s", "time"),
        ("clock", "", "clock"),
        ("random", "", "random"),
        ("spawn", "1", "spawn"),
        ("device", "gpu", "device"),
        ("connect", "example.org:80", "network"),
        ("connect", "*:443", "network"),
        ("listen", "80", "network"),
        ("folder", "/src:/here:rw", "folder:/here"),
        ("folder", "/src/lib:/here:rw", "folder:/here"),
    ] {
        let error = asking(&most(), &[(name, text)]).expect_err(text);
        assert!(
            matches!(&error, CapsError::Beyond { capability: found, .. } if found == capability),
            "{name}={text}: {error}"
        );
    }
    assert_eq!(
        asking(&most(), &[("memory", "1G")]).unwrap_err().to_string(),
        "the isolate asks for 1G, but the cell that it is in has 128M (memory); ask for less, or \
         grant the cell more when it starts"
    );
    assert_eq!(
        asking(&most(), &[("folder", "/src:/src:rw")]).unwrap_err().to_string(),
        "the isolate asks for read,write on /src at /src, but the cell that it is in has \
         read,overlay on /src at /src (folder:/src); ask for less, or grant the cell more when it starts"
    );
}

#[test]
fn a_table_of_its_own_lies_within_its_cells_and_takes_over_its_deadline() {
    let own = read("version = 1\n[memory]\nlimit = \"64M\"\n").within(&most()).unwrap();
    assert_eq!((own.memory_bytes(), own.stdio()), (Some(64 << 20), false));
    assert_eq!(own.deadline(), Some(Duration::from_secs(60)));
    read("version = 1\n[clock]\n").within(&most()).expect_err("the cell has no clock");
}
