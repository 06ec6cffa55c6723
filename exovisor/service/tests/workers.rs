//! Workers that do as they please, and the process that listens.

use exocell_service::{
    Ask, Bound, Limits, ListedModule, ListedTenant, Listing, Pool, Reception, WorkerRules,
};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;

/// How a worker answers: it is given its socket.
type Body = fn(UnixStream);

struct World {
    address: SocketAddr,
    asks: Mutex<mpsc::Receiver<Ask>>,
}

fn key(tenant: &str) -> String {
    format!("key-of-{tenant}")
}

impl World {
    /// `bob`'s worker is honest, `mallory`'s is of this kind. The first that is ended stays away.
    fn new(mallory: Body, limits: Limits) -> Self {
        Self::with(mallory, limits, 8, false)
    }

    /// The same with so many workers at once; hers are kept though they are idle.
    fn with(mallory: Body, limits: Limits, workers_max: usize, keeps_hers: bool) -> Self {
        let (send, wanted) = mpsc::channel();
        let ask = Box::new(move |ask| drop(send.send(ask)));
        let rules = WorkerRules { is_shared: false, workers_max, idle: Duration::from_secs(600) };
        let reception = Reception::new(rules, limits, &Pool::default(), ask).unwrap();
        let hash = |tenant: &str| {
            Sha256::digest(key(tenant)).iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let names = ["bob", "mallory"];
        let tenant = |name: &str| ListedTenant { name: name.to_owned(), key_sha256: hash(name) };
        let module = |name: &str| ListedModule {
            name: name.to_owned(),
            tenant: name.to_owned(),
            id: 1,
            deadline: Duration::from_millis(200),
        };
        reception.gateway.list(Listing {
            tenants: names.map(tenant).to_vec(),
            modules: names.map(module).to_vec(),
        });
        let lines = Arc::clone(&reception.lines);
        let (tell, asks) = mpsc::channel();
        std::thread::spawn(move || {
            for ask in wanted {
                match &ask {
                    Ask::Start { place, number } => {
                        let (ours, theirs) = UnixStream::pair().unwrap();
                        let body = if place == "bob" { honest } else { mallory };
                        std::thread::spawn(move || body(theirs));
                        let is_kept = keeps_hers && place == "mallory";
                        lines.started(*number, ours, is_kept).unwrap();
                    }
                    Ask::End { number } => lines.ended(*number, "was killed by a test"),
                }
                let _ = tell.send(ask);
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || reception.run(Bound::Tcp(listener), None).unwrap());
        Self { address, asks: Mutex::new(asks) }
    }

    fn call(&self, tenant: &str) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let request = format!(
            "POST /v1/call/{tenant}/f HTTP/1.1\r\nAuthorization: Bearer {}\r\n\
             Content-Length: 2\r\n\r\n[]",
            key(tenant)
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Whether the end of the first of mallory's workers is asked for.
    fn mallorys_is_to_end(&self) -> bool {
        let asks = self.asks.lock().unwrap();
        let mut hers = None;
        let is_it = |ask| match ask {
            Ask::Start { place, number } if place == "mallory" => {
                hers = Some(number);
                false
            }
            Ask::End { number } => hers == Some(number),
            Ask::Start { .. } => false,
        };
        std::iter::from_fn(|| asks.recv_timeout(Duration::from_secs(60)).ok()).any(is_it)
    }
}

/// An answer as a worker sends it.
fn frame(number: u64, status: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(status.to_le_bytes());
    bytes.extend([0; 18]);
    bytes.extend(body);
    [&(bytes.len() as u32).to_le_bytes(), &bytes[..]].concat()
}

/// The number of the next request; `None` when there are no more.
fn next(mut from: &UnixStream) -> Option<u64> {
    let mut length = [0; 4];
    from.read_exact(&mut length).ok()?;
    let mut request = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut request).ok()?;
    Some(u64::from_le_bytes(*request.first_chunk()?))
}

fn each(mut stream: UnixStream, answer: impl Fn(u64) -> Vec<u8>) {
    while let Some(number) = next(&stream) {
        // It may be gone by now.
        let _ = stream.write_all(&answer(number));
    }
}

fn honest(stream: UnixStream) {
    each(stream, |number| frame(number, 200, b"well"));
}

fn has(answer: &str, status: u16, words: &str) {
    let right = answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(words);
    assert!(right, "not {status} with {words}: {answer}");
}

fn small() -> Limits {
    Limits { output_bytes: 1000, ..Limits::default() }
}

#[test]
fn a_worker_that_says_what_is_no_answer_is_ended() {
    let bodies: [Body; 6] = [
        // For a request that there is not: that may be another tenant's.
        |stream| each(stream, |number| frame(number + 1, 200, b"mine")),
        // Twice.
        |stream| each(stream, |number| frame(number, 200, b"once").repeat(2)),
        // Longer than any answer.
        |stream| each(stream, |_| u32::MAX.to_le_bytes().to_vec()),
        // A status that would be no line of HTTP.
        |stream| each(stream, |number| frame(number, 65535, b"")),
        // Too short to be one.
        |stream| each(stream, |_| vec![2, 0, 0, 0, 1, 1]),
        // Before it is asked.
        |mut stream| {
            let _ = stream.write_all(&frame(1, 200, b"early"));
            each(stream, |number| frame(number, 200, b"late"));
        },
    ];
    for (index, body) in bodies.into_iter().enumerate() {
        let world = World::new(body, small());
        let answer = world.call("mallory");
        // It has had its answer before the second one came.
        let status = if index == 1 { "200" } else { "50" };
        let is_right = answer.starts_with(&format!("HTTP/1.1 {status}"));
        assert!(is_right || index == 5, "{index}: {answer}");
        assert!(world.mallorys_is_to_end(), "{index}");
        has(&world.call("bob"), 200, "well");
    }
}

#[test]
fn a_worker_that_says_nothing_or_reads_nothing_is_ended_and_holds_up_nobody_else() {
    let bodies: [Body; 2] = [
        |stream| while next(&stream).is_some() {},
        |stream| {
            std::thread::park();
            drop(stream);
        },
    ];
    for body in bodies {
        let world = World::new(body, small());
        std::thread::scope(|scope| {
            let silent = scope.spawn(|| world.call("mallory"));
            for _ in 0..100 {
                has(&world.call("bob"), 200, "well");
            }
            has(&silent.join().unwrap(), 503, "did not answer by the deadline");
        });
        assert!(world.mallorys_is_to_end());
        has(&world.call("bob"), 200, "well");
    }
}

#[test]
fn a_worker_that_ends_is_told_of_and_another_takes_its_place() {
    let world = World::new(
        |stream| {
            // Each answers once and is gone with the second request.
            if let Some(number) = next(&stream) {
                let _ = (&stream).write_all(&frame(number, 200, b"first"));
            }
            let _ = next(&stream);
        },
        small(),
    );
    has(&world.call("mallory"), 200, "first");
    has(&world.call("mallory"), 502, "the worker was killed by a test");
    has(&world.call("mallory"), 200, "first");
    has(&world.call("bob"), 200, "well");
}

/// Answers with how many requests came together.
fn counts(mut stream: UnixStream) {
    let mut bytes = vec![0; 1 << 20];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        let mut requests = &bytes[..count];
        let mut numbers = Vec::new();
        while let Some((length, rest)) = requests.split_first_chunk() {
            let (request, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
            numbers.push(u64::from_le_bytes(*request.first_chunk().unwrap()));
            requests = rest;
        }
        // Others come meanwhile.
        std::thread::sleep(Duration::from_millis(20));
        let together = numbers.len().to_string();
        for number in numbers {
            // It exited, and took no time.
            let mut answer = frame(number, 200, together.as_bytes());
            answer[15] = 1;
            let _ = stream.write_all(&answer);
        }
    }
}

#[test]
fn requests_that_wait_for_an_answer_go_together_or_after_a_while() {
    let world = World::new(counts, small());
    // One by one nothing waits, and then calls are known to be short.
    for _ in 0..5 {
        has(&world.call("mallory"), 200, "\r\n\r\n1");
    }
    let together = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..16).map(|_| scope.spawn(|| world.call("mallory"))).collect();
        let answers = calls.into_iter().map(|call| call.join().unwrap());
        answers.filter(|answer| !answer.ends_with("\r\n\r\n1")).count()
    });
    assert!(together > 0);
    has(&world.call("bob"), 200, "well");
}

#[test]
fn a_worker_that_is_kept_for_what_it_holds_makes_room_when_it_must() {
    let world = World::with(honest, small(), 1, true);
    has(&world.call("mallory"), 200, "well");
    has(&world.call("bob"), 200, "well");
    assert!(world.mallorys_is_to_end());
    has(&world.call("mallory"), 200, "well");
}
