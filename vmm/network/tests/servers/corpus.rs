//! What clients say: honest ones, and those that mean `other.test`.

const HOST: &str = "Host: granted.test\r\n";
const OTHER: &str = "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n";

/// Parts that mutants are made with.
pub const WORDS: &[&str] = &[
    "\r\n",
    "\n",
    "\r",
    "\r\n\r\n",
    " ",
    "\t",
    ":",
    ";",
    ",",
    "0",
    "5",
    "a",
    "\0",
    "\x0b",
    "\u{85}",
    "Host: granted.test\r\n",
    "Host: other.test\r\n",
    "host:other.test\r\n",
    "Host:granted.test:80\r\n",
    "Content-Length: 5\r\n",
    "Content-Length: 0\r\n",
    "Content-Length: 36\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Connection: keep-alive\r\n",
    "Connection: close\r\n",
    "Connection: upgrade\r\nUpgrade: websocket\r\n",
    "Expect: 100-continue\r\n",
    "X: y\r\n",
    "HTTP/1.0",
    "HTTP/1.1",
    "HTTP/0.9",
    "POST / HTTP/1.1\r\n",
    "HEAD / HTTP/1.1\r\n",
    "OPTIONS * HTTP/1.1\r\n",
    "http://other.test/",
    "//other.test/",
    "@other.test",
    "5\r\nhello\r\n0\r\n\r\n",
    "24\r\n",
    "0\r\n\r\n",
    "hello",
    "GET / HTTP/1.1\r\nHost: granted.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
];

/// What honest clients say, and how many requests that is.
pub fn honest() -> Vec<(String, usize)> {
    let get = format!("GET /a?b=c HTTP/1.1\r\n{HOST}Accept: */*\r\n\r\n");
    let post = format!("POST / HTTP/1.1\r\n{HOST}Content-Length: 5\r\n\r\nhello");
    let chunked = format!(
        "PUT /x HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n"
    );
    let expect =
        format!("POST / HTTP/1.1\r\n{HOST}Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello");
    vec![
        (get.clone(), 1),
        (format!("GET / HTTP/1.0\r\n{HOST}\r\n"), 1),
        (format!("GET //other.test/ HTTP/1.1\r\n{HOST}\r\n"), 1),
        ("GET / HTTP/1.1\r\nhost:granted.test:80\r\nConnection: close\r\n\r\n".into(), 1),
        (post.clone(), 1),
        (chunked.clone(), 1),
        (expect.clone(), 1),
        (get.repeat(3), 3),
        ([get.clone(), post, chunked, get].concat(), 4),
        (expect.repeat(2), 2),
    ]
}

/// A head with `fields` of its own after a host, and what follows.
fn after_host(line: &str, fields: &str, rest: &str) -> String {
    format!("{line}\r\n{HOST}{fields}\r\n{rest}")
}

/// What those say who mean another host. Servers differ on it, but somebody is taken in by
/// most of it.
pub fn lies() -> Vec<Vec<u8>> {
    let (get, post) = ("GET / HTTP/1.1", "POST / HTTP/1.1");
    let length = OTHER.len();
    let mut lies = vec![
        OTHER.to_owned(),
        format!("\r\n{OTHER}"),
        format!("\r\n\r\n\r\n{OTHER}"),
        "GET / HTTP/1.0\r\n\r\n".into(),
        "GET / HTTP/1.0\r\nHost: other.test\r\n\r\n".into(),
        "GET / HTTP/1.1\nHost: other.test\n\n".into(),
        format!("GET /{} HTTP/1.1\r\nHost: other.test\r\n\r\n", "a".repeat(17_000)),
        "GET /\x7f HTTP/1.1\r\nHost: other.test\r\n\r\n".into(),
        "GET /\x01 HTTP/1.1\r\nHost: other.test\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: GRANTED.test.\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: granted.test.\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: GRANTED.TEST\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: granted.test:9\r\n\r\n".into(),
        format!("GET http://other.test/ HTTP/1.1\r\n{HOST}\r\n"),
        format!("GET HTTP://other.test/ HTTP/1.1\r\n{HOST}\r\n"),
        format!("GET http://granted.test@other.test/ HTTP/1.1\r\n{HOST}\r\n"),
        "GET http://other.test/\r\n\r\n".into(),
        "GET http://granted.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n".into(),
        after_host(get, "Host: other.test\r\n", ""),
        format!("{get}\r\nHost: other.test\r\n{HOST}\r\n"),
        after_host(get, "host : other.test\r\n", ""),
        format!("{get}\r\nHost : other.test\r\n{HOST}\r\n"),
        after_host(get, " Host: other.test\r\n", ""),
        format!("{get}\r\n Host: other.test\r\n{HOST}\r\n"),
        format!("{get}\r\nX: a\u{85}Host: other.test\r\n{HOST}\r\n"),
        format!("{get}\r\nX: a\rHost: other.test\r\n{HOST}\r\n"),
        format!("{get}\r\nX: a\nHost: other.test\r\n{HOST}\r\n"),
        format!("{get}\r\nHost:\r\n other.test\r\n\r\n"),
        format!("{}{OTHER}", after_host(get, "", "")),
        format!("{}{OTHER}", after_host(get, "Content-Length: 0\r\n", "")),
        format!("{}{OTHER}", after_host(get, "Connection: Upgrade\r\nUpgrade: x\r\n", "")),
        format!("{}{OTHER}", after_host("OPTIONS * HTTP/1.1", "", "")),
        format!("{}{OTHER}", after_host("HEAD / HTTP/1.1", "", "")),
    ];
    let smuggled = [
        (format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"), "0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n".into(), "0\r\n\r\n"),
        (format!("Content-Length: 0\r\nContent-Length: {length}\r\n"), ""),
        (format!("Content-Length: {length}\r\nContent-Length: 0\r\n"), ""),
        (format!("Content-Length: {length}, {length}\r\n"), ""),
        (format!("Content-Length: +{length}\r\n"), ""),
        (format!("Content-Length: {length}\r\n"), ""),
        (format!("Content_Length: {length}\r\n"), ""),
        (format!("Content-Length : {length}\r\n"), ""),
        (format!("Transfer-Encoding: xchunked\r\nContent-Length: {length}\r\n"), ""),
        ("Transfer-Encoding: chunked\r\n".into(), "0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\n".into(), "5;a=b\r\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\n".into(), "5\r\nhello\r\n0\r\nHost: other.test\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\n".into(), "5\nhello\n0\n\n"),
        ("Transfer-Encoding: chunked\r\n".into(), "005\r\nhello\r\n000\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\n".into(), "5 \r\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: Chunked\r\n".into(), "0\r\n\r\n"),
        ("Transfer-Encoding:\tchunked\r\n".into(), "0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n".into(), "0\r\n\r\n"),
        ("Transfer-Encoding: identity, chunked\r\n".into(), "0\r\n\r\n"),
        (format!("Expect: 100-continue\r\nContent-Length: {length}\r\n"), ""),
    ];
    lies.extend(
        smuggled.map(|(fields, rest)| after_host(post, &fields, &format!("{rest}{OTHER}"))),
    );
    lies.push(after_host(
        post,
        "Transfer-Encoding: chunked\r\n",
        "3A ;/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
    ));
    lies.push(after_host(
        "POST / HTTP/1.0",
        "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n",
        &format!("0\r\n\r\n{OTHER}"),
    ));
    lies.into_iter().map(String::into_bytes).collect()
}
