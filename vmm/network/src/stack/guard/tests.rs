//! What honest clients say, and what those say who mean another host.

use super::*;
use crate::secrets::Secret;
use proptest::prelude::*;

/// Feeds `text` in pieces of `piece` bytes; what was let through.
fn said(text: &[u8], piece: usize) -> Result<Vec<u8>, Unlike> {
    let mut guard = Guard::of("granted.test", Secrets::default(), None);
    let mut through = Vec::new();
    for part in text.chunks(piece) {
        guard.held.extend_from_slice(part);
        guard.judge()?;
        guard.pass_on(|bytes| {
            through.extend_from_slice(bytes);
            Moved::Bytes(bytes.len())
        });
    }
    Ok(through)
}

fn passes(text: &str) {
    for piece in [1, 7, 10_000] {
        let through = said(text.as_bytes(), piece).unwrap();
        assert_eq!(String::from_utf8_lossy(&through), text, "{piece}");
    }
}

fn is_stopped(text: &str) {
    for piece in [1, 7, 10_000] {
        assert!(said(text.as_bytes(), piece).is_err(), "{piece}: {text}");
    }
}

/// A first message of TLS that asks for `names`, in records of `record` bytes.
fn hello(names: &[&str], record: usize) -> Vec<u8> {
    let long = |bytes: Vec<u8>| [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat();
    let list: Vec<u8> =
        names.iter().flat_map(|name| [vec![0], long(name.as_bytes().to_vec())].concat()).collect();
    let extension = [vec![0, 0], long(long(list))].concat();
    let other = [vec![0, 43], long(vec![2, 3, 4])].concat();
    let extensions = if names.is_empty() { long(other) } else { long([other, extension].concat()) };
    let body =
        [vec![3, 3], vec![7; 32], vec![0], vec![0, 2, 19, 1], vec![1, 0], extensions].concat();
    let message = [&[1][..], &(body.len() as u32).to_be_bytes()[1..], &body].concat();
    message.chunks(record).flat_map(|part| [vec![22, 3, 1], long(part.to_vec())].concat()).collect()
}

#[test]
fn tls_for_the_granted_name_passes() {
    for names in [&["granted.test"][..], &["Granted.TEST."], &[]] {
        for record in [5, 1000] {
            let text = [hello(names, record), b"\x17\x03\x03then anything".to_vec()].concat();
            for piece in [1, 10_000] {
                assert_eq!(said(&text, piece).unwrap(), text, "{names:?} {record} {piece}");
            }
        }
    }
}

#[test]
fn tls_for_another_name_is_stopped_before_a_byte_is_said() {
    for names in [&["other.test"][..], &["granted.test", "other.test"], &["a.granted.test"]] {
        for record in [5, 1000] {
            let said = said(&hello(names, record), 1);
            assert!(matches!(said, Err(Unlike::ServerName(_))), "{names:?}: {said:?}");
        }
    }
    assert!(said(b"\x16\x03\x01\x00\x05\x02\x00\x00\x01x", 100).is_err(), "not a first message");
}

#[test]
fn http_for_the_granted_host_passes() {
    passes("GET / HTTP/1.1\r\nHost: granted.test\r\n\r\n");
    passes(
        "GET / HTTP/1.1\r\nHost: Granted.Test:8080\r\n\r\nGET /2 HTTP/1.1\r\nHost:granted.test\r\n\r\n",
    );
    passes(
        "POST / HTTP/1.1\r\nhost: granted.test\r\nContent-Length: 5\r\n\r\n12345GET / HTTP/1.0\r\n\r\n",
    );
    passes(
        "POST / HTTP/1.1\r\nHost: granted.test\r\nTransfer-Encoding: chunked\r\n\r\n\
            3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: x\r\n\r\nGET / HTTP/1.1\r\nHost: granted.test\r\n\r\n",
    );
    passes("GET http://granted.test/a HTTP/1.1\r\nHost: granted.test\r\n\r\n");
}

#[test]
fn http_for_another_host_is_stopped() {
    for text in [
        "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "get / http/1.1\r\nHost: other.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: granted.test\r\nHost: other.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: granted.test\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "GET http://other.test/ HTTP/1.1\r\nHost: granted.test\r\n\r\n",
        "GET http://granted.test@other.test/ HTTP/1.1\r\nHost: granted.test\r\n\r\n",
        "CONNECT other.test:443 HTTP/1.1\r\nHost: granted.test\r\n\r\n",
        "CONNECT granted.test:443 HTTP/1.1\r\nHost: granted.test\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: granted.test\r\nUpgrade: h2c\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: granted.test\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: granted.test\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: granted.test\r\nContent-Length: +5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: granted.test\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST / HTTP/1.1\r\nHost: granted.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
    ] {
        is_stopped(text);
    }
}

#[test]
fn another_protocol_needs_the_peers_consent() {
    let wish = b"GET / HTTP/1.1\r\nHost: granted.test\r\nUpgrade: websocket\r\n\r\n";
    let lie = b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n";
    for (answer, passes) in [("HTTP/1.1 101 Switching", true), ("HTTP/1.1 200 OK", false)] {
        let mut guard = Guard::of("granted.test", Secrets::default(), None);
        guard.held.extend_from_slice(&[&wish[..], lie].concat());
        guard.judge().unwrap();
        assert_eq!(guard.ready, wish.len(), "what follows waits for the answer");
        guard.answered(answer.as_bytes());
        assert_eq!(guard.judge().is_ok(), passes);
    }
}

#[test]
fn other_protocols_pass() {
    passes("SSH-2.0-client\r\nanything");
    passes("EHLO me\r\nMAIL FROM:<a@b>\r\n");
    for bytes in
        [&b"\0\0\0\x08\x04\xd2\x16\x2f"[..], b"0032git-upload-pack /p\0host=x\0", b"\x10\x20mqtt"]
    {
        assert_eq!(said(bytes, 1).unwrap(), bytes);
    }
}

#[test]
fn what_is_held_is_bounded() {
    let endless = [&b"\x16\x03\x01\xff\xff\x01\xff\xff\xff"[..], &[0; HELD_MAX]].concat();
    assert!(said(&endless, 1000).is_err());
    let head = [&b"GET / HTTP/1.1\r\nX: "[..], &[b'a'; HELD_MAX]].concat();
    assert!(said(&head, 1000).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic(
        start in prop::sample::select(vec![&b""[..], b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"]),
        rest: Vec<u8>,
        piece in 1usize..20,
    ) {
        let _ = said(&[start, &rest].concat(), piece);
    }
}

#[test]
fn requests_get_their_secrets_in_whatever_pieces_they_come() {
    let secret =
        Secret::read("KEY=longer than that@granted.test", "hold".into(), |_| None).unwrap();
    let secrets = Secrets::new(vec![secret]);
    let head = |key: &str| {
        format!("POST / HTTP/1.1\r\nHost: granted.test\r\nKey: {key}\r\nContent-Length: 4\r\n\r\n")
    };
    // In the body it is not a secret, however the request ends.
    let said = format!("{}hold{}hold", head("hold"), head("hold"));
    let expected = format!("{0}hold{0}hold", head("longer than that"));
    for piece in [1, 3, 50, 1000] {
        let mut guard = Guard::of("granted.test", secrets.clone(), None);
        let mut through = Vec::new();
        for part in said.as_bytes().chunks(piece) {
            guard.held.extend_from_slice(part);
            guard.judge().unwrap();
            // A peer that takes little at a time.
            while guard.ready > 0 {
                guard.pass_on(|bytes| {
                    let some = bytes.get(..5).unwrap_or(bytes);
                    through.extend_from_slice(some);
                    Moved::Bytes(some.len())
                });
            }
        }
        assert_eq!(String::from_utf8_lossy(&through), expected, "{piece}");
        assert_eq!(guard.given(), ["KEY", "KEY"]);
        assert!(guard.given().is_empty());
    }
}

#[test]
fn a_request_that_is_for_another_host_gets_no_secret() {
    let secret = Secret::read("KEY=value@granted.test", "hold".into(), |_| None).unwrap();
    let mut guard = Guard::of("granted.test", Secrets::new(vec![secret]), None);
    guard.held.extend_from_slice(b"GET / HTTP/1.1\r\nHost: other.test\r\nKey: hold\r\n\r\n");
    assert!(guard.judge().is_err());
    assert_eq!((guard.ready, guard.given()), (0, vec![]));
}
