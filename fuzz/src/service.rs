//! Clients of the modules' service.

use exocell_service::{Front, Limits, ModuleStore, Pool, Service};
use exocell_xgate::CapabilitySet;
use std::path::Path;
use std::sync::OnceLock;
use tokio::runtime::Runtime;

/// Stands for the tenant's key, which is another each time.
const KEY: &[u8] = b"KEY";
/// A command that says what it reads; functions over numbers.
const MODULE: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 64))
    (i32.store (i32.const 4) (i32.const 1000))
    (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
    (i32.store (i32.const 4) (i32.load (i32.const 8)))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))
  (func (export "add") (param i32 i64 f64) (result i64) (i64.extend_i32_s (local.get 0)))
  (func (export "trap") unreachable))"#;

struct World {
    runtime: Runtime,
    service: Service,
    key: String,
    /// Where the module lies.
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let store = ModuleStore::open(dir.path()).expect("a store");
        let text = "version = 1\n[memory]\nlimit = \"1M\"\n[stdio]\n[time]\ndeadline = \"10s\"";
        let caps = CapabilitySet::parse(text, Path::new("/")).expect("the grant is well-formed");
        let added = store.add("m", "t", MODULE.as_bytes(), &caps).expect("it is admitted");
        let limits = Limits { head_bytes: 1 << 10, body_bytes: 2 << 10, ..Limits::default() };
        let pool = Pool { isolates: 16, stacks: 16, ..Pool::default() };
        let networks = Box::new(|_: &str, _: &CapabilitySet| Ok(None));
        let service = Service::new(&store, pool, limits, networks).expect("a service");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        Self { runtime, service, key: added.key.expect("the tenant is new"), _dir: dir }
    }
}

/// Requests, one after the other, with bodies, queries and keys of anyone's choice. Every answer
/// is whole.
pub fn requests(bytes: &[u8]) {
    static WORLD: OnceLock<World> = OnceLock::new();
    let world = WORLD.get_or_init(World::new);
    let mut request = bytes.to_vec();
    if let Some(at) = bytes.windows(KEY.len()).position(|window| window == KEY) {
        request.splice(at..at + KEY.len(), world.key.bytes());
    }
    for front in [Front::Calls, Front::Metrics] {
        let mut stream = tokio::io::join(&request[..], Vec::new());
        world.runtime.block_on(world.service.client(&mut stream, front));
        let mut answers = &stream.writer()[..];
        while !answers.is_empty() {
            answers = after_one(answers).expect("an answer is whole");
        }
    }
}

/// What follows the first answer, by its own length.
fn after_one(answers: &[u8]) -> Option<&[u8]> {
    let end = answers.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(answers.get(..end)?).ok()?;
    let mut lines = head.strip_prefix("HTTP/1.1 ")?.lines();
    let length = lines.find_map(|line| line.strip_prefix("Content-Length: "))?;
    answers.get(end + 4 + length.parse::<usize>().ok()?..)
}

/// Each kind of request, two on one connection, and some that are refused.
pub fn request_seeds() -> Vec<Vec<u8>> {
    let seed = |start: &str, more: &str, body: &str| {
        let length = body.len();
        format!(
            "{start} HTTP/1.1\r\nAuthorization: Bearer KEY\r\nContent-Length: {length}\r\n{more}\r\n{body}"
        )
    };
    let call = seed("POST /v1/call/m/add", "", "[1, -2, 3.5e7]");
    let seeds = [
        call.clone() + &call,
        seed("POST /v1/call/m/trap", "Connection: close\r\n", "[]"),
        seed("POST /v1/run/m?arg=a%20b&arg=%00&arg=+", "Accept: application/json\r\n", "text"),
        seed("POST /v1/run/m?arg=x", "", "more text"),
        seed("GET /v1/stats", "", ""),
        seed("GET /metrics", "Transfer-Encoding: chunked\r\n", ""),
        seed("PUT /v1/call/m/add", "Content-Length: 5\r\n", ""),
        seed("POST /v1/call/m/add", &"X: y\r\n".repeat(40), "[]"),
    ];
    seeds.map(String::into_bytes).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_it_says() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP";
        assert_eq!(after_one(answer), Some(&b"HTTP"[..]));
        for broken in [&answer[..30], b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", b"x"] {
            assert_eq!(after_one(broken), None);
        }
    }
}
