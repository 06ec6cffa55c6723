//! What honest clients say, and what those say who mean another host.

mod heads;
mod hellos;

use super::*;
use crate::secrets::Secret;
use proptest::prelude::*;

/// A guard for the granted name at port 80.
fn guard() -> Guard {
    Guard::of("granted.test", 80, Secrets::default(), None)
}

/// Feeds `text` in pieces of `piece` bytes; what was let through before the error, if any.
fn fed(guard: &mut Guard, text: &[u8], piece: usize) -> (Vec<u8>, Result<(), Unlike>) {
    let mut through = Vec::new();
    for part in text.chunks(piece) {
        let judged = guard.hold(part);
        through.extend(guard.passed());
        if judged.is_err() {
            return (through, judged);
        }
    }
    (through, Ok(()))
}

#[track_caller]
fn passes(text: &[u8]) {
    for piece in [1, 7, 10_000] {
        let (through, judged) = fed(&mut guard(), text, piece);
        let shown = String::from_utf8_lossy(text);
        assert_eq!((through.as_slice(), judged), (text, Ok(())), "{piece}: {shown}");
    }
}

/// Whatever the pieces it comes in, it is refused, and nothing of it goes out.
#[track_caller]
fn is_refused(text: &[u8], reason: &str) {
    for piece in [1, 7, 100_000] {
        let (through, judged) = fed(&mut guard(), text, piece);
        let shown = String::from_utf8_lossy(text.get(..200).unwrap_or(text)).into_owned();
        let Err(unlike) = judged else { panic!("{piece}: passes: {shown}") };
        assert!(unlike.to_string().contains(reason), "{piece}: {unlike}: {shown}");
        assert_eq!(through, b"", "{piece}: {shown}");
    }
}

#[test]
fn what_is_neither_http_nor_tls_is_refused_at_its_first_words() {
    for text in [
        &b"SSH-2.0-client\r\n"[..],
        b"EHLO me\r\n",
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        b"\x10\x20mqtt",
        b"*1\r\n$4\r\nPING\r\n",
        b"get key\r\n",
        b"USER anonymous\r\n",
        b"any protocol\n",
        b"\r\n\r\nGET / HTTP/1.1\r\nHost: granted.test\r\n\r\n",
        b"\x00\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        // SSL 2.0, an alert, a change of ciphers.
        b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10",
        b"\x15\x03\x01\x00\x02\x01\x5a",
        b"\x14\x03\x03\x00\x01\x01",
    ] {
        is_refused(text, "neither HTTP/1 nor TLS; a rule HOST:PORT/raw");
    }
}

#[test]
fn a_server_that_speaks_first_is_refused_by_name() {
    let mut guard = guard();
    let told = guard.answered(b"SSH-2.0-server\r\n").unwrap_err().to_string();
    assert!(told.contains("the server spoke first") && told.contains("/raw"), "{told}");
    // In the middle of what has not been judged it has been told nothing either.
    let mut guard = self::guard();
    guard.hold(b"GET / HT").unwrap();
    assert!(guard.answered(b"220 hello").is_err());
}

#[test]
fn silence_ends_after_its_time_and_not_once_something_was_said() {
    let now = Instant::now();
    let mut guard = guard();
    assert!(guard.due().is_some());
    assert_eq!(guard.expire(now + SILENCE_MAX / 2), Ok(()));
    let told = guard.expire(now + SILENCE_MAX * 2).unwrap_err().to_string();
    assert!(told.contains("60 seconds") && told.contains("/raw"), "{told}");
    guard.hold(b"GET / HTTP/1.1\r\nHost: gran").unwrap();
    assert_eq!(guard.expire(now + SILENCE_MAX * 2), Err(Unlike::Silence), "slow bytes too");
    guard.hold(b"ted.test\r\n\r\n").unwrap();
    assert_eq!((guard.due(), guard.expire(now + SILENCE_MAX * 2)), (None, Ok(())));
    assert!(Guard::open().due().is_none());
}

#[test]
fn what_ends_in_the_middle_is_refused() {
    let mut guard = guard();
    assert_eq!(guard.end(), Ok(()));
    guard.hold(b"GET / HTTP/1.1\r\nHost: other").unwrap();
    assert!(guard.end().is_err());
    let mut whole = self::guard();
    whole.hold(b"GET / HTTP/1.1\r\nHost: granted.test\r\n\r\n").unwrap();
    assert_eq!(whole.end(), Ok(()));
}

#[test]
fn an_open_guard_lets_everything_through() {
    let mut guard = Guard::open();
    guard.hold(b"SSH-2.0-client\r\n").unwrap();
    assert_eq!(guard.passed(), b"SSH-2.0-client\r\n");
    assert_eq!(guard.answered(b"SSH-2.0-server\r\n"), Ok(()));
    assert!(guard.is_open());
}

/// What has a secret over TLS.
fn guard_of_tls() -> Guard {
    let secrets = Secret::read("K=v@https://granted.test", "hold".into(), |_| None).unwrap();
    let secrets = Secrets::new(vec![secrets]);
    let authority = crate::authority::Authority::new(&secrets, None).unwrap().unwrap();
    let opener = authority.opener("granted.test", 443, secrets).unwrap();
    Guard::of("granted.test", 443, Secrets::default(), Some(opener))
}

#[test]
fn where_there_is_a_secret_over_tls_nothing_else_goes_out() {
    for text in [
        &b"GET / HTTP/1.1\r\nHost: granted.test\r\n\r\n"[..],
        b"\x15\x03\x01\x00\x02\x01\x5a",
        b"\x14\x03\x03\x00\x01\x01",
        b"SSH-2.0",
    ] {
        let (through, judged) = fed(&mut guard_of_tls(), text, 1);
        assert_eq!((through, judged), (vec![], Err(Unlike::NotTls)));
    }
    let hello = hellos::hello(&["granted.test"], 100);
    let mut guard = guard_of_tls();
    let (through, judged) = fed(&mut guard, &hello, 1);
    assert_eq!((through, judged), (vec![], Ok(())), "it is for who opens it");
    assert_eq!(guard.opener().map(|(_, first)| first), Some(hello));
    let (through, judged) = fed(&mut guard_of_tls(), &hellos::hello(&["other.test"], 100), 1);
    assert!(through.is_empty() && matches!(judged, Err(Unlike::ServerName(_))));
}

#[test]
fn in_opened_tls_only_http_is_spoken() {
    let inside = || Guard::inside("granted.test", 443, Secrets::default());
    for text in [&b"any protocol\n"[..], &hellos::hello(&["granted.test"], 100), b"\0\x01"] {
        let (through, judged) = fed(&mut inside(), text, 1);
        assert_eq!((through, judged), (vec![], Err(Unlike::NotHttp)));
    }
    let request = b"GET / HTTP/1.1\r\nHost: granted.test:443\r\n\r\n";
    assert_eq!(fed(&mut inside(), request, 1), (request.to_vec(), Ok(())));
}

proptest! {
    #[test]
    fn no_bytes_panic(
        start in prop::sample::select(vec![
            &b""[..],
            b"\x16\x03\x01",
            b"GET / HTTP/1.1\r\n",
            b"POST / HTTP/1.1\r\nHost: granted.test\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: granted.test\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        ]),
        rest: Vec<u8>,
        answer: Vec<u8>,
        piece in 1usize..20,
    ) {
        let mut guard = guard();
        let _ = fed(&mut guard, &[start, &rest].concat(), piece);
        let _ = guard.answered(&answer);
        let _ = fed(&mut guard, &rest, piece);
    }

    /// What goes out does not depend on the pieces in which it came.
    #[test]
    fn pieces_make_no_difference(
        lines in prop::collection::vec(prop::sample::select(heads::PIECES.to_vec()), 1..12),
        piece in 1usize..40,
    ) {
        let text = lines.concat();
        let whole = fed(&mut guard(), text.as_bytes(), text.len());
        let parts = fed(&mut guard(), text.as_bytes(), piece);
        prop_assert_eq!(whole.1.is_ok(), parts.1.is_ok());
        prop_assert_eq!(whole.0, parts.0);
    }
}
