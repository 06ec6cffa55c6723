//! Clients that send files, well and badly.

use super::*;
use proptest::prelude::*;

/// A client that says what it is to say, whatever it hears.
struct Scripted {
    says: VecDeque<Packet>,
    heard: Vec<Packet>,
}

impl Line for Scripted {
    fn receive(&mut self) -> io::Result<Option<Packet>> {
        Ok(self.says.pop_front())
    }

    fn send(&mut self, packet: &Packet) -> io::Result<()> {
        self.heard.push(packet.clone());
        Ok(())
    }
}

fn file(path: &str, size: i64) -> Packet {
    stat(Stat { path: path.into(), mode: 0o644, size, ..Stat::default() })
}

fn stat(stat: Stat) -> Packet {
    Packet { kind: STAT, stat: Some(stat), ..Packet::default() }
}

fn data(id: u32, data: &[u8]) -> Packet {
    Packet { kind: DATA, id, data: data.to_vec(), ..Packet::default() }
}

fn received(says: Vec<Packet>) -> (io::Result<Vec<u8>>, Vec<Packet>) {
    let mut line = Scripted { says: says.into(), heard: Vec::new() };
    let mut out = Vec::new();
    let received = receive(&mut line, &mut out, 1 << 20, &mut |_| ());
    (received.map(|()| out), line.heard)
}

fn why(says: Vec<Packet>) -> String {
    let (received, heard) = received(says);
    let why = received.unwrap_err().to_string();
    let told = heard.last().expect("the client is told");
    assert_eq!((told.kind, String::from_utf8_lossy(&told.data).as_ref()), (ERROR, why.as_str()));
    why
}

#[test]
fn contents_come_in_any_order_and_are_written_in_theirs() {
    let end = Packet::of(STAT, 0);
    let directory = Stat { path: b"d".into(), mode: go::DIRECTORY | 0o700, ..Stat::default() };
    let (out, heard) = received(vec![
        file("a", 3),
        stat(directory),
        file("d/b", 4),
        end,
        data(2, b"of"),
        data(0, b"o"),
        data(2, b" b"),
        data(2, b""),
        data(0, b"fa"),
        data(0, b""),
        Packet::of(FINISH, 0),
    ]);
    let asked: Vec<(i32, u32)> = heard.iter().map(|packet| (packet.kind, packet.id)).collect();
    assert_eq!(asked, [(REQUEST, 0), (REQUEST, 2), (FINISH, 0)]);
    let out = out.unwrap();
    let mut found = Vec::new();
    for entry in tar::Archive::new(out.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = String::new();
        entry.read_to_string(&mut content).unwrap();
        found.push((entry.path().unwrap().display().to_string(), content));
    }
    let found: Vec<(&str, &str)> = found.iter().map(|(n, c)| (n.as_str(), c.as_str())).collect();
    assert_eq!(found, [("a", "ofa"), ("d", ""), ("d/b", "of b")]);
}

#[test]
fn what_makes_no_sense_or_is_too_much_is_refused_in_words() {
    let end = || Packet::of(STAT, 0);
    let link = |path: &[u8]| Stat { path: path.into(), mode: go::SYMLINK, ..Stat::default() };
    for (says, word) in [
        (vec![], "ended before"),
        (vec![file("a", 1)], "ended before"),
        (vec![file("a", 1), end()], "ended before"),
        (vec![data(0, b"x")], "before it has named"),
        (vec![file("a", -1), end()], "negative"),
        (vec![file("a", 2 << 20), end()], "too much"),
        (vec![file("a", i64::MAX), file("b", i64::MAX), end()], "too much"),
        (vec![file(&"x".repeat(5000), 0), end()], "at most 4096"),
        (vec![file("", 0), end()], "without a name"),
        (vec![file("a\0b", 0), end()], "zero"),
        (vec![file("a", 1), end(), data(1, b"x")], "not asked for"),
        (vec![file("a", 1), end(), data(0, b"xy")], "changed"),
        (vec![file("a", 1), end(), data(0, b"")], "changed"),
        (vec![file("a", 0), end(), data(0, b""), data(0, b"")], "more than it was asked for"),
        (vec![file("a", 1), end(), Packet::of(FINISH, 0)], "something else"),
        (vec![file("../a", 0), end(), data(0, b"")], "../a"),
        (vec![file("/a", 0), end(), data(0, b"")], "/a"),
        (vec![stat(link(b"../l")), end()], "../l"),
        (vec![stat(Stat { mode: go::DEVICE, ..link(b"dev") }), end()], "device"),
    ] {
        let (received, _) = received(says.clone());
        let why = received.unwrap_err().to_string();
        assert!(why.contains(word), "{word}: {why}");
    }
    assert!(why(vec![file("a", -1), end()]).contains("negative"));
    let failed = Packet { kind: ERROR, data: b"no\x1b[1m disk".to_vec(), ..Packet::default() };
    let why = why(vec![failed]);
    assert!(why.contains("disk") && !why.contains('\x1b'), "{why}");
}

proptest! {
    #[test]
    fn no_client_is_a_panic(
        kinds in prop::collection::vec((0..6i32, 0..4u32, 0..5usize, any::<u32>()), 0..40),
    ) {
        let says = kinds.into_iter().map(|(kind, id, bytes, mode)| Packet {
            kind,
            id,
            data: vec![7; bytes],
            stat: (bytes != 4).then(|| Stat {
                path: vec![b'a' + id as u8; bytes],
                mode,
                size: i64::from(id),
                link: vec![b'l'; bytes / 2],
                ..Stat::default()
            }),
        });
        let _ = received(says.collect());
    }
}
