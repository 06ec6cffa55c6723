//! Requests of HTTP/1.

use super::*;

/// Parts of requests, honest ones and others.
pub const PIECES: [&str; 20] = [
    "GET / HTTP/1.1\r\n",
    "POST /a?b=%20 HTTP/1.1\r\n",
    "Host: granted.test\r\n",
    "Host: granted.test:80\r\n",
    "Host: other.test\r\n",
    "\r\n",
    "\n",
    "Content-Length: 5\r\n",
    "Content-Length: 0\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Connection: upgrade\r\nUpgrade: websocket\r\n",
    "Expect: 100-continue\r\n",
    "5\r\n",
    "0\r\n",
    "12345",
    "12345\r\n",
    " ",
    "X: y\r\n",
    "GET / HTTP/1.1\r\nHost: granted.test\r\n\r\n",
    "\x01",
];

/// A request with `fields`, which end with CR LF, and `rest` after its head.
fn request(line: &str, fields: &str, rest: &str) -> String {
    format!("{line}\r\n{fields}\r\n{rest}")
}

const LINE: &str = "GET / HTTP/1.1";
const POST: &str = "POST / HTTP/1.1";
const HOST: &str = "Host: granted.test\r\n";
const OTHER: &str = "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n";

#[test]
fn requests_for_the_granted_host_pass() {
    let get = request(LINE, HOST, "");
    let chunked = request(
        POST,
        &format!("{HOST}Transfer-Encoding: chunked\r\n"),
        "3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n",
    );
    let with_body = request(POST, &format!("{HOST}Content-Length: 5\r\n"), "12345");
    for text in [
        get.clone(),
        request("GET / HTTP/1.0", HOST, ""),
        request("OPTIONS * HTTP/1.1", HOST, ""),
        request("M-SEARCH /x HTTP/1.1", HOST, ""),
        request("GET /a/b;c=d?x[0]={1}|2^&y=%C3%BC+`'()*!~ HTTP/1.1", HOST, ""),
        request("GET //two HTTP/1.1", HOST, ""),
        request(LINE, "Host:granted.test\r\nAccept: */*\r\nX-Empty:\r\nX_Y:\ta \r\n", ""),
        request(
            LINE,
            "host: granted.test:80\r\nConnection: keep-alive, TE\r\nTE: trailers\r\n",
            "",
        ),
        request("GET /search HTTP/1.1", &format!("{HOST}Content-Length: 2\r\n"), "{}"),
        request(POST, &format!("{HOST}Content-Length: 0\r\n"), ""),
        with_body.clone(),
        chunked.clone(),
        [get.clone(), with_body, chunked, get].concat(),
    ] {
        passes(text.as_bytes());
    }
}

#[test]
fn another_host_is_refused() {
    for fields in [
        "Host: other.test\r\n",
        "Host: granted.test.evil.test\r\n",
        "Host: xgranted.test\r\n",
        "Host: granted.test@other.test\r\n",
        "Host: other.test@granted.test\r\n",
        "Host: granted.test:81\r\n",
        "Host: granted.test:\r\n",
        "Host: granted.test:080\r\n",
        "Host: granted.test:80:80\r\n",
        "Host: granted.test, other.test\r\n",
        "Host: granted.test other.test\r\n",
        "Host: granted.test/\r\n",
        "Host: http://granted.test\r\n",
        "Host: [::1]\r\n",
        "Host: \tgranted.test\r\n",
        "Host: granted.test \r\n",
        "Host:\r\n",
    ] {
        is_refused(request(LINE, fields, "").as_bytes(), "HTTP asks for the host");
    }
    for spelling in ["Granted.test", "GRANTED.TEST:80", "granted.test.", "granted.test.:80"] {
        let text = request(LINE, &format!("Host: {spelling}\r\n"), "");
        is_refused(text.as_bytes(), "in another spelling");
    }
    for fields in ["", "Accept: */*\r\n", "Host: granted.test\r\nHost: granted.test\r\n"] {
        is_refused(request(LINE, fields, "").as_bytes(), "no host, or for two");
    }
    let two = request(LINE, "Host: granted.test\r\nHost: other.test\r\n", "");
    is_refused(two.as_bytes(), "no host, or for two");
    let absolute = |to: &str| request(&format!("GET {to} HTTP/1.1"), HOST, "");
    for to in ["http://other.test/", "HTTP://other.test", "https://granted.test@other.test/"] {
        is_refused(absolute(to).as_bytes(), "HTTP asks for the host");
    }
    for to in ["http://granted.test/", "http://granted.test:80?x"] {
        is_refused(absolute(to).as_bytes(), "as for proxies");
    }
    for to in ["other.test:443", "granted.test:443", "/"] {
        let text = request(&format!("CONNECT {to} HTTP/1.1"), HOST, "");
        is_refused(text.as_bytes(), "a tunnel");
    }
    for field in [
        "X-Forwarded-Host: other.test",
        "X_Forwarded.Host: other.test",
        "X~Forwarded-Host: other.test",
        "X-Forwarded-Authority: other.test",
        "X-Real-Host: other.test",
        "X-Envoy-Original-Host: other.test",
        "Forwarded: host=x",
        "X-Original-URL: /admin",
    ] {
        let text = request(LINE, &format!("{HOST}{field}\r\n"), "");
        is_refused(text.as_bytes(), "a field by which proxies");
    }
}

#[test]
fn lengths_and_hosts_by_other_characters_are_refused() {
    for field in ["Content.Length: 3", "Content~Length: 3", "Transfer.Encoding: chunked"] {
        let text = request(LINE, &format!("{HOST}{field}\r\n"), "");
        is_refused(text.as_bytes(), "a field of HTTP");
    }
}

#[test]
fn what_servers_read_in_several_ways_is_refused() {
    let long = format!("GET /{} HTTP/1.1", "a".repeat(17_000));
    let many = "X: y\r\n".repeat(101);
    let big = format!("X: {}\r\n", "y".repeat(10_000)).repeat(6);
    for (line, fields) in [
        (long.as_str(), HOST),
        (LINE, &format!("{HOST}{many}")),
        (LINE, &format!("{HOST}{big}")),
        (LINE, &format!("{HOST}X: {}\r\n", "y".repeat(17_000))),
        ("GET /\x01 HTTP/1.1", HOST),
        ("GET /\x7f HTTP/1.1", HOST),
        ("GET /\u{e4} HTTP/1.1", HOST),
        ("GET /\t HTTP/1.1", HOST),
        ("GET /a#b HTTP/1.1", HOST),
        ("GET /a\\b HTTP/1.1", HOST),
        ("GET /%zz HTTP/1.1", HOST),
        ("GET /% HTTP/1.1", HOST),
        ("GET / HTTP/1.2", HOST),
        ("GET / HTTP/1.1 ", HOST),
        ("GET / http/1.1", HOST),
        ("GET /  HTTP/1.1", HOST),
        ("GET /", HOST),
        ("GET /x\r", HOST),
        (LINE, "Host: granted.test\r\nhost : other.test\r\n"),
        (LINE, "Host: granted.test\r\n Host: other.test\r\n"),
        (LINE, "Host: granted.test\r\n\tHost: other.test\r\n"),
        (LINE, "Host: granted.test\r\nHost\r\n"),
        (LINE, "Host: granted.test\r\n: x\r\n"),
        (LINE, "Host: granted.test\r\nX: a\rHost: other.test\r\n"),
        (LINE, "Host: granted.test\nX: y\r\n"),
        (LINE, "X: a\u{85}Host: other.test\r\nHost: granted.test\r\n"),
        (LINE, "X: a\x0bHost: other.test\r\nHost: granted.test\r\n"),
        (LINE, "X: a\0b\r\nHost: granted.test\r\n"),
        (LINE, "Host: granted.test\r\nConnection: Host\r\n"),
        (LINE, "Host: granted.test\r\nConnection: close, content-length\r\n"),
        (POST, "Host: granted.test\r\nContent_Length: 5\r\n"),
        (POST, "Host: granted.test\r\nTransfer_Encoding: chunked\r\n"),
        (LINE, "Host: granted.test\r\nExpect: something\r\n"),
        (LINE, "Host: granted.test\r\nUpgrade: TLS/1.2\r\nConnection: upgrade\r\n"),
        (LINE, "Host: granted.test\r\nUpgrade: websocket\r\n"),
        (POST, "Host: granted.test\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"),
    ] {
        is_refused(request(line, fields, "").as_bytes(), "cannot be checked");
    }
    is_refused(b"GET / HTTP/1.1\nHost: granted.test\n\n", "cannot be checked");
    is_refused(b"GET http://other.test/\r\n\r\n", "HTTP asks for the host other.test");
    for text in ["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/2.0\r\nHost: granted.test\r\n\r\n"]
    {
        is_refused(text.as_bytes(), "HTTP/2");
    }
    let upgrade = "Host: granted.test\r\nConnection: upgrade\r\nUpgrade: h2c\r\n";
    is_refused(request(LINE, upgrade, "").as_bytes(), "HTTP/2");
}

#[test]
fn a_length_that_is_not_plain_is_refused() {
    for length in [
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 5 ",
        "Content-Length: \t5",
        "Content-Length: 05",
        "Content-Length: 0x5",
        "Content-Length: 5, 5",
        "Content-Length: 1_0",
        "Content-Length:",
        "Content-Length: 9999999999999999",
        "Content-Length: 18446744073709551621",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 0\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: Chunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: \tchunked",
        "Transfer-Encoding: chunked ",
        "Transfer-Encoding: \"chunked\"",
    ] {
        let text = request(POST, &format!("{HOST}{length}\r\n"), "");
        is_refused(text.as_bytes(), "the length of a request of HTTP");
    }
    let old = request("POST / HTTP/1.0", &format!("{HOST}Transfer-Encoding: chunked\r\n"), "");
    is_refused(old.as_bytes(), "the length of a request of HTTP");
}

/// Of what comes after a head that is as it should be only as much goes on as can be judged.
#[track_caller]
fn is_cut(head: &str, rest: &str) {
    for piece in [1, 7, 10_000] {
        let (through, judged) = fed(&mut guard(), format!("{head}{rest}").as_bytes(), piece);
        assert!(judged.is_err(), "{piece}: {rest:?}");
        let through = String::from_utf8(through).unwrap();
        assert!(!through.contains("other.test"), "{piece}: {through:?}");
    }
}

#[test]
fn chunks_that_servers_read_in_several_ways_are_refused() {
    let head = request(POST, &format!("{HOST}Transfer-Encoding: chunked\r\n"), "");
    for rest in [
        "zz\r\n",
        "\r\n",
        " 5\r\n12345\r\n",
        "5 \r\n12345\r\n",
        "5;x=y\r\n12345\r\n",
        "5\n12345\r\n",
        "05\r\n12345\r\n",
        "0x5\r\n12345\r\n",
        "+5\r\n12345\r\n",
        "12345678\r\n",
        "10000000000000005\r\n12345\r\n",
        "5\r\n123456\r\n",
        "5\r\n12345\n",
        "5\r\n12345\r5\r\n",
        "00\r\n\r\n",
        "0\r\nHost: other.test\r\n\r\n",
        "0\r\nX: y\r\n\r\n",
        "0\r\n\n",
        "3A ;/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
    ] {
        is_cut(&head, rest);
    }
    is_cut(&head, &format!("5\r\n12345\r\n0\r\n\r\n{OTHER}"));
}

#[test]
fn each_of_many_requests_is_judged() {
    let get = request(LINE, HOST, "");
    let post = request(POST, &format!("{HOST}Content-Length: 5\r\n"), "12345");
    for before in [&get, &post, &[get.as_str(), &post, &get].concat()] {
        is_cut(before, OTHER);
        is_cut(before, "GARBAGE\r\n\r\n");
        is_cut(before, "\r\nGET / HTTP/1.1\r\nHost: granted.test\r\n\r\n");
    }
}

#[test]
fn a_body_that_is_a_request_for_who_does_not_read_it_is_refused() {
    let post =
        |body: &str| request(POST, &format!("{HOST}Content-Length: {}\r\n", body.len()), body);
    for body in [
        OTHER,
        "\r\n\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "get\t/\x0bhttp/1.1\nHost: other.test\n\n",
        " POST  /x   HTTP/1.1 \r\nHost: other.test\r\n\r\n",
        "GET /x\r\n",
        "GET /x",
        "BREW /pot HTTP/1.0",
        "\u{e9}ET / HTTP/1.1\r\n",
        &format!("GET /{}", "a".repeat(20_000)),
    ] {
        let (through, judged) = fed(&mut guard(), post(body).as_bytes(), 100_000);
        assert!(judged.is_err(), "{body}");
        assert!(!String::from_utf8(through).unwrap().contains(body), "{body}");
    }
    for body in [
        "{\"say\": \"GET / HTTP/1.1\"}",
        "a=b",
        "--boundary\r\nContent-Disposition: form-data\r\n\r\nGET / HTTP/1.1\r\n",
        "GET what you want now\r\n",
        "word",
        "two words",
        "\r\n\r\n",
        &"A".repeat(100_000),
        &format!("{{\"long\": \"{}\"}}", "b c".repeat(30_000)),
    ] {
        passes(post(body).as_bytes());
    }
    let none = request(POST, &format!("{HOST}Content-Length: 3\r\n"), "a b");
    passes([none.clone(), none].concat().as_bytes());
}

const WISH: &str = "GET / HTTP/1.1\r\nHost: granted.test\r\nConnection: Upgrade\r\n\
                    Upgrade: websocket\r\n\r\n";
/// The first bytes of a frame: text, masked, of five bytes.
const FRAME: &[u8] = b"\x81\x85\x01\x02\x03\x04hello";

#[test]
fn websockets_need_the_servers_consent_and_frames() {
    let answers = ["HTTP/1.1 101 Switching", "HTTP/1.1 200 OK", "HTTP/1.0 101 X", "HTTP/1.1 100 "];
    for (at, answer) in answers.into_iter().enumerate() {
        let mut guard = guard();
        guard.hold(&[WISH.as_bytes(), FRAME].concat()).unwrap();
        assert_eq!(guard.passed(), WISH.as_bytes(), "what follows waits for the answer");
        assert_eq!(guard.end(), Ok(()), "it may still go on");
        for byte in answer.as_bytes() {
            guard.answered(&[*byte]).unwrap();
        }
        assert_eq!(guard.hold(b"").is_ok(), at == 0, "{answer}");
        assert_eq!(guard.passed() == FRAME, at == 0);
        assert_eq!(guard.is_open(), at == 0);
    }
    // A server that did not speak of frames takes nothing else for a request.
    for lie in [OTHER.as_bytes(), b"\x16\x03", b"\x81\x05", b"\x83\x85", b"PRI"] {
        let mut guard = guard();
        guard.hold(WISH.as_bytes()).unwrap();
        guard.answered(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").unwrap();
        assert!(guard.hold(lie).is_err());
        assert_eq!(guard.passed(), WISH.as_bytes());
    }
}

#[test]
fn an_answer_to_another_request_is_not_taken_for_consent() {
    // Its body could be anything, and would come first.
    is_cut(&request(LINE, HOST, ""), WISH);
    let mut guard = guard();
    guard.hold(WISH.as_bytes()).unwrap();
    guard.answered(b"HTTP/1.1 401 No\r\nContent-Length: 13\r\n\r\n").unwrap();
    guard.answered(b"HTTP/1.1 101 ").unwrap();
    assert!(guard.hold(FRAME).is_err());
}

#[test]
fn what_is_expected_before_a_body_is_not_asked_for() {
    let head = |expect: &str| {
        format!("POST / HTTP/1.1\r\nHost: granted.test\r\n{expect}Content-Length: 5\r\n\r\n")
    };
    for expect in ["Expect: 100-continue\r\n", "expect:100-Continue\r\n"] {
        for piece in [1, 7, 1000] {
            let text = format!("{}12345{}", head(expect), head(""));
            let (through, judged) = fed(&mut guard(), text.as_bytes(), piece);
            assert_eq!(judged, Ok(()));
            assert_eq!(String::from_utf8(through).unwrap(), format!("{0}12345{0}", head("")));
        }
    }
}

#[test]
fn what_is_held_is_bounded() {
    let mut guard = guard();
    let head = [&b"GET / HTTP/1.1\r\nX: "[..], &[b'a'; HELD_MAX]].concat();
    assert!(fed(&mut guard, &head, 1000).1.is_err());
    assert!(guard.held.len() < HELD_MAX);
}

#[test]
fn requests_get_their_secrets_in_whatever_pieces_they_come() {
    let secret =
        Secret::read("KEY=longer than that@granted.test", "hold".into(), |_| None).unwrap();
    let secrets = Secrets::new(vec![secret]);
    let head = |key: &str, expect: &str| {
        format!(
            "POST / HTTP/1.1\r\nHost: granted.test\r\nKey: {key}\r\n{expect}Content-Length: 4\r\n\r\n"
        )
    };
    // In the body it is not a secret, however the request ends.
    let expect = "Expect: 100-continue\r\n";
    let said = format!("{}hold{}hold", head("hold", ""), head("hold", expect));
    let expected = format!("{0}hold{0}hold", head("longer than that", ""));
    for piece in [1, 3, 50, 1000] {
        let mut guard = Guard::of("granted.test", 80, secrets.clone(), None);
        let mut through = Vec::new();
        for part in said.as_bytes().chunks(piece) {
            guard.hold(part).unwrap();
            // A peer that takes little at a time.
            while guard.has_judged() {
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
    let mut guard = Guard::of("granted.test", 80, Secrets::new(vec![secret]), None);
    assert!(guard.hold(b"GET / HTTP/1.1\r\nHost: other.test\r\nKey: hold\r\n\r\n").is_err());
    assert_eq!((guard.ready, guard.given()), (0, vec![]));
}
