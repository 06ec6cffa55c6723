//! TLS, as far as it is read.

use super::*;

fn long(bytes: Vec<u8>) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat()
}

/// An extension that names servers: kinds of names, and the names.
fn named(names: &[(u8, &[u8])]) -> Vec<u8> {
    let list: Vec<u8> =
        names.iter().flat_map(|(kind, name)| [vec![*kind], long(name.to_vec())].concat()).collect();
    [vec![0, 0], long(long(list))].concat()
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind][..], &(body.len() as u32).to_be_bytes()[1..], body].concat()
}

fn records(kind: u8, message: &[u8], record: usize) -> Vec<u8> {
    let parts = message.chunks(record);
    parts.flat_map(|part| [vec![kind, 3, 1], long(part.to_vec())].concat()).collect()
}

/// A client's hello with these extensions, in records of `record` bytes.
fn hello_with(extensions: &[Vec<u8>], record: usize) -> Vec<u8> {
    let other = [vec![0, 43], long(vec![2, 3, 4])].concat();
    let extensions = long([other, extensions.concat()].concat());
    let body =
        [vec![3, 3], vec![7; 32], vec![0], vec![0, 2, 19, 1], vec![1, 0], extensions].concat();
    records(22, &message(1, &body), record)
}

/// A client's hello that asks for `names`, in records of `record` bytes.
pub fn hello(names: &[&str], record: usize) -> Vec<u8> {
    let names: Vec<(u8, &[u8])> = names.iter().map(|name| (0, name.as_bytes())).collect();
    let extensions = if names.is_empty() { vec![] } else { vec![named(&names)] };
    hello_with(&extensions, record)
}

/// A server's hello of TLS 1.3, or of 1.2.
fn answer(random: &[u8; 32], is_1_3: bool) -> Vec<u8> {
    let version = [vec![0, 43], long(vec![3, 4])].concat();
    let extensions = if is_1_3 { long(version) } else { vec![] };
    let body = [vec![3, 3], random.to_vec(), vec![0], vec![19, 1, 0], extensions].concat();
    records(22, &message(2, &body), 1000)
}

fn retry() -> Vec<u8> {
    const RANDOM: &str = "CF21AD74E59A6111BE1D8C021E65B891C2A211167ABB8C5E079E09E2C8A8339C";
    let byte = |at: usize| u8::from_str_radix(&RANDOM[2 * at..2 * at + 2], 16).unwrap();
    answer(&std::array::from_fn(byte), true)
}

const CHANGE: &[u8] = b"\x14\x03\x03\x00\x01\x01";
const ENCRYPTED: &[u8] = b"\x17\x03\x03\x00\x03abc";
const ALERT: &[u8] = b"\x15\x03\x03\x00\x02\x02\x28";

#[test]
fn the_granted_name_passes_and_what_follows_waits_for_the_server() {
    for record in [5, 1000] {
        for piece in [1, 10_000] {
            let text = hello(&["granted.test"], record);
            let mut guard = guard();
            let after = [CHANGE, ENCRYPTED, b"anything"].concat();
            let (through, judged) = fed(&mut guard, &[text.clone(), after.clone()].concat(), piece);
            assert_eq!((through, judged), (text, Ok(())), "{record} {piece}");
            // Alerts that warn come before the hello of some servers.
            let said = [b"\x15\x03\x03\x00\x02\x01\x70", &answer(&[1; 32], true)[..]].concat();
            said.chunks(piece).for_each(|part| guard.answered(part).unwrap());
            guard.hold(b"").unwrap();
            assert_eq!(guard.passed(), after);
            assert!(guard.is_open());
        }
    }
}

#[test]
fn another_name_is_refused_before_a_byte_is_said() {
    for names in [&["other.test"][..], &["a.granted.test"], &["granted.test:443"], &["[::1]"]] {
        for record in [5, 1000] {
            is_refused(&hello(names, record), "TLS asks for the server");
        }
    }
    for name in ["Granted.test", "granted.test."] {
        is_refused(&hello(&[name], 1000), "in another spelling");
    }
    let both = named(&[(0, b"granted.test")]);
    for extensions in [
        vec![],
        vec![both.clone(), both],
        vec![named(&[(0, b"granted.test"), (0, b"other.test")])],
        vec![named(&[(0, b"granted.test"), (1, b"other.test")])],
        vec![named(&[(1, b"granted.test")])],
        vec![named(&[(0, b"")])],
        vec![named(&[])],
        vec![[vec![0, 0], long(vec![])].concat()],
    ] {
        is_refused(&hello_with(&extensions, 1000), "no server, or for two");
    }
    let null = named(&[(0, b"granted.test\0.other.test")]);
    is_refused(&hello_with(&[null], 1000), "TLS asks for the server");
}

#[test]
fn a_hidden_name_is_refused() {
    for kind in [0xfe0du16, 0xffce] {
        let hidden = [kind.to_be_bytes().to_vec(), long(vec![0; 40])].concat();
        let text = hello_with(&[named(&[(0, b"granted.test")]), hidden], 1000);
        is_refused(&text, "TLS hides the server");
    }
}

#[test]
fn records_that_are_not_as_they_should_be_are_refused() {
    let good = hello(&["granted.test"], 1000);
    let with = |at: usize, bytes: &[u8]| {
        let mut text = good.clone();
        text.splice(at..at + bytes.len(), bytes.iter().copied());
        text
    };
    for text in [
        with(1, b"\x02\x00"),
        with(1, b"\x0f\x01"),
        with(1, b"\x03\x00"),
        with(1, b"\x03\x04"),
        with(3, b"\x00\x00"),
        with(3, b"\xff\xff"),
        with(5, b"\x02"),
        with(6, b"\xff"),
        with(9, b"\x03\x00"),
        with(43, b"\xff"),
        [good.clone(), b"x".to_vec()].concat().split_off(1),
    ] {
        let (through, judged) = fed(&mut guard(), &text, 1);
        assert!(judged.is_err() && through.is_empty(), "{judged:?} {text:?}");
    }
    // A second message in the records of the first.
    let two = [&good[5..], b"\x0b\0\0\0"].concat();
    assert!(fed(&mut guard(), &records(22, &two, 2000), 1).1.is_err());
    // A record of another kind between those of one hello.
    let parts = hello(&["granted.test"], 60);
    let torn = [&parts[..65], ALERT, &parts[65..]].concat();
    assert!(fed(&mut guard(), &torn, 1).1.is_err());
    // A hello without end.
    let endless = [&b"\x16\x03\x01\x40\x00\x01\x00\x80\x00"[..], &[0; HELD_MAX]].concat();
    is_refused(&endless, "cannot be checked");
    let endless =
        [b"\x16\x03\x01\x00\x01\x01".to_vec(), b"\x16\x03\x01\x00\x01\x00".repeat(12_000)];
    assert!(fed(&mut guard(), &endless.concat(), 1000).1.is_err());
}

/// A guard that has passed a hello and heard the answer.
fn after(answer: &[u8]) -> Guard {
    let mut guard = guard();
    guard.hold(&hello(&["granted.test"], 1000)).unwrap();
    guard.passed();
    guard.answered(answer).unwrap();
    guard
}

#[test]
fn another_hello_that_the_server_asks_for_is_judged_too() {
    for before in [&b""[..], CHANGE, &[ENCRYPTED, CHANGE].concat()] {
        let other = [before, &hello(&["other.test"], 50)].concat();
        let (through, judged) = fed(&mut after(&retry()), &other, 1);
        assert_eq!(through, before);
        assert!(matches!(judged, Err(Unlike::ServerName(_))), "{judged:?}");
        let none = [before, &hello(&[], 50)].concat();
        assert_eq!(fed(&mut after(&retry()), &none, 1).1, Err(Unlike::NoServerName));

        let same = [before, &hello(&["granted.test"], 50), CHANGE, ENCRYPTED, b"all"].concat();
        let mut guard = after(&retry());
        assert_eq!(fed(&mut guard, &same, 1), (same, Ok(())));
        assert!(guard.is_open());
    }
    let thrice = hello(&["granted.test"], 50).repeat(2);
    assert!(fed(&mut after(&retry()), &thrice, 1).1.is_err(), "there is only one retry");
}

#[test]
fn no_hello_comes_after_the_servers() {
    for answer in [answer(&[1; 32], true), answer(&[1; 32], false)] {
        for before in [&b""[..], ALERT] {
            let again = [before, &hello(&["granted.test"], 1000)].concat();
            let (through, judged) = fed(&mut after(&answer), &again, 1);
            assert_eq!(through, before);
            assert!(judged.is_err());
        }
    }
    let mut guard = after(&answer(&[1; 32], true));
    assert!(guard.hold(b"\x14\x03\x03\x00\x01\x02").is_err(), "no change of ciphers");
}

#[test]
fn the_rest_of_an_older_handshake_passes() {
    let certificate = message(11, &[5; 3000]);
    let exchange = [message(16, &[6; 66]), message(15, &[7; 70])].concat();
    for record in [3, 1000] {
        let plain = records(22, &[certificate.clone(), exchange.clone()].concat(), record);
        let said = [&plain, CHANGE, b"\x16\x03\x03\x00\x05\x01abcd", b"all"].concat();
        let mut guard = after(&answer(&[1; 32], false));
        assert_eq!(fed(&mut guard, &said, 1), (said, Ok(())));
        assert!(guard.is_open());
    }
    // A session that is resumed: at once a change of ciphers.
    let said = [CHANGE, b"\x16\x03\x03\x00\x05\x01abcd"].concat();
    assert_eq!(fed(&mut after(&answer(&[1; 32], false)), &said, 1), (said, Ok(())));
    // A change of ciphers in the middle of a message is none.
    let torn = [&records(22, &exchange[..20], 1000), CHANGE].concat();
    assert!(fed(&mut after(&answer(&[1; 32], false)), &torn, 1).1.is_err());
}

#[test]
fn a_server_that_does_not_speak_tls_gets_no_more() {
    for said in
        [&b"HTTP/1.1 400 Bad Request\r\n"[..], b"220 smtp", b"\x16\x03\x03\x00\x04\x01\0\0\0"]
    {
        let mut guard = guard();
        guard.hold(&hello(&["granted.test"], 1000)).unwrap();
        assert!(guard.answered(said).is_err());
    }
    let mut guard = guard();
    guard.hold(&hello(&["granted.test"], 1000)).unwrap();
    let warnings = ALERT.repeat(10_000);
    assert!(guard.answered(&warnings).is_err(), "warnings without end");
}
