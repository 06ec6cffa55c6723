//! Clients of BuildKit's protocol that say what no client says. Messages are put together by hand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::RecvStream;
use h2::server::SendResponse;
use hyper::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::common::docker::Server;
use crate::common::{eventually, unique};

/// Nothing that is waited for takes so long.
const LONG: Duration = Duration::from_secs(90);

/// A file, as a client says that it is.
#[derive(Debug, Clone, Default)]
pub struct File {
    pub name: String,
    /// As Go has it.
    pub mode: u32,
    pub content: String,
    /// Its length, where that is another one.
    pub said: i64,
    pub link: String,
}

/// A field of a message: a number, or bytes.
fn number(field: u32, value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint(u64::from(field) << 3, &mut bytes);
    varint(value, &mut bytes);
    bytes
}

fn text(field: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint(u64::from(field) << 3 | 2, &mut bytes);
    varint(value.len() as u64, &mut bytes);
    bytes.extend(value);
    bytes
}

fn varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(message.len() as u32);
    bytes.put(message);
    bytes.freeze()
}

/// A connection that a call has taken over; otherwise the answer's first line.
async fn taken_over(server: &Server, path: &str, head: &str) -> Result<UnixStream, String> {
    let mut stream = UnixStream::connect(server.socket()).await.expect("the server listens");
    let request = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n{head}\r\n");
    stream.write_all(request.as_bytes()).await.expect("a request");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.expect("an answer"));
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let line = answer.lines().next().unwrap_or_default().to_owned();
    if line.contains("101") { Ok(stream) } else { Err(line) }
}

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: h2c\r\n";

/// A client's way to ask.
type Asking = h2::client::SendRequest<Bytes>;

async fn asking(server: &Server) -> Asking {
    let stream = taken_over(server, "/v1.47/grpc", UPGRADE).await.expect("a connection");
    let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    send.ready().await.expect("HTTP/2")
}

/// Makes a call of these bytes; the answer's status and words.
async fn call(send: &Asking, path: &str, bytes: Bytes) -> (u32, String) {
    let request = Request::post(format!("http://x{path}"))
        .version(hyper::Version::HTTP_2)
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    let (answer, mut stream) = send.clone().send_request(request, false).expect("a call");
    stream.send_data(bytes, true).expect("a message");
    let answer = timeout(LONG, answer).await.expect("an answer in time").expect("an answer");
    let (head, mut body) = answer.into_parts();
    while let Some(chunk) = timeout(LONG, body.data()).await.expect("an answer in time") {
        let chunk = chunk.expect("an answer");
        let _ = body.flow_control().release_capacity(chunk.len());
    }
    let trailers = body.trailers().await.expect("an end");
    outcome(&trailers.unwrap_or(head.headers))
}

fn outcome(trailers: &HeaderMap) -> (u32, String) {
    let text = |name| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    (text("grpc-status").parse().expect("a status"), text("grpc-message").to_owned())
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(work)
}

const SOLVE: &str = "/moby.buildkit.v1.Control/Solve";

/// Calls that no client makes.
pub fn calls_that_make_no_sense(server: &Server) {
    run(async {
        for (path, head, status) in [
            ("/grpc", "", "400"),
            ("/grpc", "Connection: Upgrade\r\nUpgrade: tcp\r\n", "400"),
            ("/session", UPGRADE, "400"),
            ("/session", "X-Docker-Expose-Session-Uuid: x\r\n", "400"),
        ] {
            let refused = taken_over(server, path, head).await.expect_err("it is refused");
            assert!(refused.contains(status), "{path} {head:?}: {refused}");
        }
        // No HTTP/2 at all.
        let session = format!("{UPGRADE}X-Docker-Expose-Session-Uuid: garbage\r\n");
        for (path, head) in [("/grpc", UPGRADE), ("/session", session.as_str())] {
            let mut stream = taken_over(server, path, head).await.expect("a connection");
            stream.write_all(&[0xff; 4096]).await.expect("garbage");
            let mut heard = Vec::new();
            // It ends, in whatever way.
            let _ = timeout(LONG, stream.read_to_end(&mut heard)).await.expect("its end");
        }
        let send = asking(server).await;
        let of = |frontend: &str| framed(&[text(1, b"r"), text(6, frontend.as_bytes())].concat());
        let with =
            |more: Vec<u8>| framed(&[text(1, b"r"), text(6, b"dockerfile.v0"), more].concat());
        let long = [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0; 64]].concat();
        for (path, bytes, status, word) in [
            ("/x.Y/Z", framed(b""), 12, "/x.Y/Z"),
            ("/moby.buildkit.v1.Control/ListenBuildHistory", framed(b""), 12, "history"),
            ("/moby.buildkit.v1.frontend.LLBBridge/NewContainer", framed(b""), 12, "NewContainer"),
            (SOLVE, Bytes::new(), 3, "no message"),
            (SOLVE, long.into(), 8, "bytes"),
            (SOLVE, Bytes::from_static(&[1, 0, 0, 0, 0]), 12, "compressed"),
            (SOLVE, Bytes::from_static(&[0, 0, 0, 0, 9, 1]), 3, "cut short"),
            (SOLVE, framed(&[0xff; 64]), 3, "cannot be read"),
            (SOLVE, framed(&text(6, b"dockerfile.v0")), 3, "name"),
            (SOLVE, of("gateway.v0"), 12, "gateway.v0"),
            (SOLVE, with(text(2, &text(1, b"op"))), 12, "LLB"),
            (SOLVE, with(text(9, b"network.host")), 12, "--network host"),
            (SOLVE, with(text(9, b"device")), 12, "--allow device"),
            (SOLVE, with(text(12, b"policy")), 12, "policy"),
            (SOLVE, with(text(13, &text(1, b"oci"))), 12, "oci"),
            (SOLVE, with(text(7, &[text(1, b"squash"), text(2, b"1")].concat())), 12, "squash"),
        ] {
            let (found, words) = call(&send, path, bytes).await;
            assert!(found == status && words.contains(word), "{word}: {found} {words}");
        }
        // It answers all the same.
        assert_eq!(call(&send, "/moby.buildkit.v1.Control/Info", framed(b"")).await.0, 0);
    });
}

/// A session whose client sends `files` for whatever it is asked, and hangs up after it was asked
/// so many times.
async fn session(
    server: &Server,
    id: &str,
    files: Vec<File>,
    hangs_up: Option<usize>,
    taken: Taken,
) {
    let method = "X-Docker-Expose-Session-Grpc-Method: /moby.filesync.v1";
    let head = format!(
        "{UPGRADE}X-Docker-Expose-Session-Uuid: {id}\r\n{method}.FileSync/DiffCopy\r\n\
         {method}.FileSend/DiffCopy\r\n"
    );
    let stream = taken_over(server, "/session", &head).await.expect("a connection");
    let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
    let mut asked = 0;
    while let Some(Ok((request, respond))) = connection.accept().await {
        asked += 1;
        if Some(asked) == hangs_up {
            return;
        }
        if request.uri().path().contains("FileSend") {
            tokio::spawn(take_output(request.into_body(), respond, taken.clone()));
            continue;
        }
        let only: Vec<String> = request
            .headers()
            .get_all("followpaths")
            .iter()
            .map(|value| value.to_str().expect("a path").to_owned())
            .collect();
        let files = files.clone();
        let files = files.into_iter().filter(|file| only.is_empty() || only.contains(&file.name));
        tokio::spawn(send_files(request.into_body(), respond, files.collect()));
    }
}

/// What was put out to a client.
type Taken = Arc<Mutex<Vec<u8>>>;

/// Takes an output: messages of one field of bytes.
async fn take_output(mut body: RecvStream, mut respond: SendResponse<Bytes>, taken: Taken) {
    let mut heard = BytesMut::new();
    while let Some(Ok(chunk)) = body.data().await {
        let _ = body.flow_control().release_capacity(chunk.len());
        heard.extend_from_slice(&chunk);
    }
    let mut taken = taken.lock().expect("no test panics here");
    while heard.len() >= 5 {
        heard.advance(1);
        let length = heard.get_u32() as usize;
        let mut message = heard.split_to(length);
        // The field's number, and a length that ends with its first small byte.
        message.advance(1);
        while message.get_u8() >= 0x80 {}
        taken.extend_from_slice(&message);
    }
    let mut head = Response::new(());
    head.headers_mut().insert("content-type", "application/grpc".parse().expect("a type"));
    head.headers_mut().insert("grpc-status", 0.into());
    let _ = respond.send_response(head, true);
}

async fn send_files(mut body: RecvStream, mut respond: SendResponse<Bytes>, files: Vec<File>) {
    let mut head = Response::new(());
    head.headers_mut().insert("content-type", "application/grpc".parse().expect("a type"));
    let Ok(mut stream) = respond.send_response(head, false) else { return };
    let mut say = |message: Vec<u8>| {
        // Who is refused hears no more.
        let _ = stream.send_data(framed(&message), false);
    };
    for file in &files {
        let size = if file.said == 0 { file.content.len() as i64 } else { file.said };
        let stat = [
            text(1, file.name.as_bytes()),
            number(2, file.mode.into()),
            number(5, size as u64),
            text(7, file.link.as_bytes()),
        ];
        say(text(2, &stat.concat()));
    }
    say(Vec::new());
    let mut heard = BytesMut::new();
    let mut packets = VecDeque::new();
    while let Some(Ok(chunk)) = body.data().await {
        let _ = body.flow_control().release_capacity(chunk.len());
        heard.extend_from_slice(&chunk);
        while heard.len() >= 5 {
            let length = u32::from_be_bytes(heard[1..5].try_into().expect("four bytes")) as usize;
            if heard.len() < 5 + length {
                break;
            }
            heard.advance(5);
            packets.push_back(heard.split_to(length));
        }
        while let Some(packet) = packets.pop_front() {
            match packet.as_ref() {
                // REQUEST, and which file.
                [8, 1, rest @ ..] => {
                    let id = if let [24, id] = rest { usize::from(*id) } else { 0 };
                    let content = files[id].content.as_bytes();
                    let of =
                        |data: &[u8]| [number(1, 2), number(3, id as u64), text(4, data)].concat();
                    if !content.is_empty() {
                        say(of(content));
                    }
                    say(of(b""));
                }
                [8, 3] => {
                    say(number(1, 3));
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", 0.into());
                    let _ = stream.send_trailers(trailers);
                    return;
                }
                _ => return,
            }
        }
    }
}

fn solve(id: &str, more: &[u8]) -> Bytes {
    let id = id.as_bytes();
    framed(&[&text(1, id), &text(5, id), &text(6, b"dockerfile.v0"), more].concat())
}

/// Has an image built of `files` by a client with a session of its own.
pub fn build(server: &Server, files: Vec<File>, hangs_up: Option<usize>) -> Result<(), String> {
    solved(server, files, hangs_up, &[], Taken::default())
}

/// The same, as an archive like those of `docker save`.
pub fn archive(server: &Server, files: Vec<File>, name: &str) -> Result<Vec<u8>, String> {
    let attribute = [text(1, b"name"), text(2, name.as_bytes())].concat();
    let exporter = text(13, &[text(1, b"docker"), text(2, &attribute)].concat());
    let taken = Taken::default();
    solved(server, files, None, &exporter, taken.clone())?;
    Ok(std::mem::take(&mut *taken.lock().expect("no test panics here")))
}

fn solved(
    server: &Server,
    files: Vec<File>,
    hangs_up: Option<usize>,
    more: &[u8],
    taken: Taken,
) -> Result<(), String> {
    run(async {
        let id = unique("s");
        let send = asking(server).await;
        let solved = call(&send, SOLVE, solve(&id, more));
        let session = async {
            session(server, &id, files, hangs_up, taken).await;
            std::future::pending().await
        };
        let (status, words) = tokio::select! {
            solved = solved => solved,
            never = session => never,
        };
        if status == 0 { Ok(()) } else { Err(words) }
    })
}

/// A session that ends while a step runs.
pub fn session_that_ends(server: &Server, files: Vec<File>) {
    run(async {
        let id = unique("s");
        let send = asking(server).await;
        let ended = session(server, &id, files, None, Taken::default());
        let begun = async {
            loop {
                if server.records().len() == 1 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let (status, words) = tokio::join!(call(&send, SOLVE, solve(&id, &[])), async {
            tokio::select! { () = ended => {}, () = begun => {} }
        })
        .0;
        assert!(status != 0 && words.contains("session"), "{status} {words}");
    });
    eventually("no cell is left", || server.records().is_empty());
}
