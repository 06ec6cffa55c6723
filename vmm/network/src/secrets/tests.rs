//! Which texts are secrets, and where their values go.

use proptest::prelude::*;

use super::*;

const PLACEHOLDER: &str = "exocell-secret-0123";

fn secret(text: &str) -> Result<Secret, SecretError> {
    let known = |name: &str| (name == "KNOWN").then(|| "from here".to_owned());
    Secret::read(text, PLACEHOLDER.to_owned(), known)
}

fn secrets(text: &str) -> Secrets {
    Secrets::new(vec![secret(text).unwrap()])
}

#[test]
fn a_secret_has_a_name_a_value_and_a_server() {
    for (text, name, value, host, port) in [
        ("KEY=abc@api.test", "KEY", "abc", "api.test", 80),
        ("_k2=a=b@c@API.test.:8080", "_k2", "a=b@c", "api.test", 8080),
        ("KNOWN@api.test:1", "KNOWN", "from here", "api.test", 1),
    ] {
        let read = secret(text).unwrap();
        assert_eq!((read.name.as_str(), read.value.as_slice()), (name, value.as_bytes()), "{text}");
        assert_eq!((read.host.as_str(), read.port), (host, port), "{text}");
        assert!(!format!("{read:?}").contains(value), "{read:?}");
    }
}

#[test]
fn what_is_no_secret_is_refused_and_no_value_is_repeated() {
    let long = format!("KEY={}@api.test", "x".repeat(VALUE_BYTES_MAX + 1));
    for text in [
        "hunter2",
        "KEY=hunter2",
        "hunter2!@api.test",
        "1KEY=hunter2@api.test",
        "=hunter2@api.test",
        "KEY=@api.test",
        "KEY=hunter2\r\nX: y@api.test",
        "UNKNOWN@api.test",
        "KEY=hunter2@",
        "KEY=hunter2@192.0.2.1",
        "KEY=hunter2@[2001:db8::1]",
        "KEY=hunter2@*.api.test",
        "KEY=hunter2@api..test",
        "KEY=hunter2@api.test:0",
        "KEY=hunter2@api.test:x",
        "KEY=hunter2@api.test:80:80",
        &long,
    ] {
        let error = secret(text).expect_err(text).to_string();
        assert!(!error.contains("hunter2") && !error.contains("xxxx"), "{error}");
    }
}

#[test]
fn secrets_are_for_one_server() {
    let all = secrets("KEY=v@api.test:8080");
    assert_eq!(all.of("api.test", 8080, false).iter().count(), 1);
    for (host, port) in [("api.test", 80), ("www.api.test", 8080), ("test", 8080)] {
        assert_eq!(all.of(host, port, false).iter().count(), 0, "{host}:{port}");
    }
}

fn filled(head: &str) -> Option<String> {
    let filled = secrets("KEY=va lue@api.test").fill(head.as_bytes()).unwrap()?;
    assert_eq!(filled.names, ["KEY"]);
    Some(String::from_utf8(filled.head).unwrap())
}

#[test]
fn values_go_into_fields_and_nowhere_else() {
    let head =
        format!("GET /{PLACEHOLDER} HTTP/1.1\r\nKey: x{PLACEHOLDER}{PLACEHOLDER}y\r\nB: c\r\n\r\n");
    let expected = format!("GET /{PLACEHOLDER} HTTP/1.1\r\nKey: xva lueva luey\r\nB: c\r\n\r\n");
    assert_eq!(filled(&head).as_deref(), Some(expected.as_str()));
    for empty in ["", "\r\n", "\r\n\n"] {
        assert_eq!(filled(&format!("{empty}{head}")), Some(format!("{empty}{expected}")));
        for (method, more) in [
            ("TRACE", ""),
            ("trace", ""),
            ("TRACK", ""),
            ("POST", "X-HTTP-Method-Override: TRACE\r\n"),
            ("POST", "x-http-method: trace \r\n"),
        ] {
            let traced = format!("{empty}{method} / HTTP/1.1\r\n{more}Key: {PLACEHOLDER}\r\n\r\n");
            assert_eq!(filled(&traced), None, "its answer would tell the value");
        }
    }
    assert_eq!(filled("GET / HTTP/1.1\r\nKey: exocell-secret-012\r\n\r\n"), None);
    assert_eq!(Secrets::default().fill(head.as_bytes()), Ok(None));
}

#[test]
fn values_go_only_into_fields_for_credentials() {
    for name in [
        "Authorization",
        "proxy-authorization",
        "Cookie",
        "X-Api-Key",
        "apikey",
        "PRIVATE-TOKEN",
        "X_Vault_Token",
        "Client-Secret",
        "X-Auth",
        "X-Amz-Security-Token",
    ] {
        let head = format!("GET / HTTP/1.1\r\n{name}: {PLACEHOLDER}\r\n\r\n");
        let expected = format!("GET / HTTP/1.1\r\n{name}: va lue\r\n\r\n");
        assert_eq!(filled(&head), Some(expected));
    }
    for name in [
        "Origin",
        "Referer",
        "User-Agent",
        "Access-Control-Request-Headers",
        "X-Request-Id",
        "X-Correlation-ID",
        "Sec-WebSocket-Protocol",
        "Sec-WebSocket-Key",
        "Idempotency-Key",
        "Host",
        "Connection",
        "Content-Length",
        "Range",
        "Forwarded",
        PLACEHOLDER,
    ] {
        let head = format!("GET / HTTP/1.1\r\n{name}: {PLACEHOLDER}\r\n\r\n");
        assert!(name == PLACEHOLDER || filled(&head).is_none(), "{name}");
        // A value in the place of a name would be a field that nobody has judged.
        let whole = filled(&format!("GET / HTTP/1.1\r\n{PLACEHOLDER}: {name}\r\n\r\n"));
        assert!(whole.is_none_or(|whole| whole.contains(&format!("{PLACEHOLDER}: "))), "{name}");
    }
}

#[test]
fn values_go_into_basic_credentials() {
    let encoded = STANDARD.encode(format!("user:{PLACEHOLDER}"));
    for name in ["Authorization:", "authorization: ", "Proxy-Authorization:\t"] {
        for scheme in ["Basic", "basic"] {
            let head = format!("GET / HTTP/1.1\r\n{name}{scheme} {encoded} \r\nB: c\r\n\r\n");
            let put = STANDARD.encode("user:va lue");
            let expected = format!("GET / HTTP/1.1\r\n{name}{scheme} {put}\r\nB: c\r\n\r\n");
            assert_eq!(filled(&head), Some(expected));
        }
    }
    for other in
        ["Authorization: Basic ????", "Authorization: Basic", "Authorization:", "X: Basic QQ=="]
    {
        assert_eq!(filled(&format!("GET / HTTP/1.1\r\n{other}\r\n\r\n")), None, "{other}");
    }
}

#[test]
fn a_head_gets_a_bounded_number_of_values() {
    let head = |count| format!("GET / HTTP/1.1\r\nKey: {}\r\n\r\n", PLACEHOLDER.repeat(count));
    let own = secrets("KEY=v@api.test");
    assert!(own.fill(head(PLACES_MAX).as_bytes()).unwrap().is_some());
    assert_eq!(own.fill(head(PLACES_MAX + 1).as_bytes()), Err(TooMany));
}

proptest! {
    #[test]
    fn any_bytes_are_filled_without_harm(parts in prop::collection::vec(
        prop_oneof![Just(PLACEHOLDER.as_bytes().to_vec()), Just(b"\r\nAuthorization: Basic ".to_vec()), Just(b"\r\nKey: ".to_vec()),
                    prop::collection::vec(any::<u8>(), 0..20)], 0..12)) {
        let head = parts.concat();
        if let Ok(Some(filled)) = secrets("KEY=v@api.test").fill(&head) {
            prop_assert!(!filled.names.is_empty());
        }
    }
}
