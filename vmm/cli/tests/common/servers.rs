//! Servers for cells to talk to.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::ServerConfig;

use super::{eventually, tls};

/// A server of HTTP; answers every request with `body`.
pub struct Web {
    pub port: u16,
    /// The first lines and hosts of what was asked.
    pub asked: Arc<Mutex<Vec<String>>>,
}

impl Web {
    /// Listens at `address` of where the caller is; port 0 takes any.
    pub fn new(address: &str, body: &'static str) -> Self {
        Self::by(address, move |stream, heard| answer(stream, body, heard))
    }

    /// The same over TLS.
    pub fn over_tls(address: &str, body: &'static str, config: Arc<ServerConfig>) -> Self {
        Self::by(address, move |stream, heard| {
            answer(tls::stream(stream, config.clone()), body, heard);
        })
    }

    fn by(
        address: &str,
        serve: impl Fn(TcpStream, &Mutex<Vec<String>>) + Clone + Send + 'static,
    ) -> Self {
        let listener =
            TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (heard, serve) = (heard.clone(), serve.clone());
                std::thread::spawn(move || serve(stream, &heard));
            }
        });
        Self { port, asked }
    }

    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(mut stream: impl Read + Write, body: &str, heard: &Mutex<Vec<String>>) {
    let mut piece = [0; 4096];
    let mut request = Vec::new();
    loop {
        match stream.read(&mut piece) {
            Ok(count @ 1..) => request.extend_from_slice(&piece[..count]),
            _ => return,
        }
        while let Some(end) = request.windows(4).position(|end| end == b"\r\n\r\n") {
            let head: Vec<u8> = request.drain(..end + 4).collect();
            heard.lock().unwrap().push(String::from_utf8_lossy(&head).into_owned());
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            if stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).is_err() {
                return;
            }
        }
    }
}

/// A server of streams that gives a secret away to whoever says anything.
pub fn secret(address: &str) {
    let listener = TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                if matches!(stream.read(&mut [0; 4096]), Ok(1..)) {
                    let _ = stream.write_all(b"SECRET");
                }
            });
        }
    });
}

/// A server of HTTP with two hosts: `peer.test` and one with secrets.
pub fn two_hosts(address: &str) {
    Web::by(address, |stream, _| either(stream));
}

/// The same over TLS.
pub fn two_hosts_over_tls(address: &str, config: Arc<ServerConfig>) {
    Web::by(address, move |stream, _| either(tls::stream(stream, config.clone())));
}

fn either(mut stream: impl Read + Write) {
    let (mut said, mut piece) = (String::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut piece) {
        said += &String::from_utf8_lossy(&piece[..count]);
        let secret = said.contains("other.test") || !said.contains("peer.test");
        let body = if secret { "SECRET" } else { "PUBLIC" };
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n{body}");
    }
}

/// A server of datagrams that gives a secret away; what it was told.
pub fn secret_datagrams(address: &str) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let socket = UdpSocket::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            heard.lock().unwrap().push(buffer[..count].to_vec());
            let _ = socket.send_to(b"SECRETSECRETSECRET", from);
        }
    });
    told
}

/// A server of streams that says everything back; its port.
pub fn echo(address: &str) -> u16 {
    let listener = TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut reader = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut { &stream });
                let _ = stream.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    port
}

/// A server of streams that says `words` to whoever comes; its port.
pub fn greeter(address: &str, words: &'static str) -> u16 {
    let web = Web::by(address, move |mut stream, _| {
        let _ = stream.write_all(words.as_bytes());
        // Until the caller has gone.
        while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {}
    });
    web.port
}

/// A server of datagrams that says everything back; its port.
pub fn echo_datagrams(address: &str) -> u16 {
    let socket = UdpSocket::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    let port = socket.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..count], from);
        }
    });
    port
}

/// A server of streams over TLS that says everything back.
pub fn echo_over_tls(address: &str, config: Arc<ServerConfig>) {
    Web::by(address, move |stream, _| {
        let mut stream = tls::stream(stream, config.clone());
        let mut piece = [0; 16_384];
        while let Ok(count @ 1..) = stream.read(&mut piece) {
            if stream.write_all(&piece[..count]).is_err() {
                return;
            }
        }
    });
}

/// What who listens at `address` answers to `hello`, once somebody does. One that comes before it
/// listens is turned away.
#[track_caller]
pub fn answered(address: &str) -> String {
    let mut answer = String::new();
    eventually("it answers", || {
        let Ok(mut caller) = TcpStream::connect(address) else { return false };
        caller.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        answer.clear();
        caller.write_all(b"hello").is_ok()
            && caller.read_to_string(&mut answer).is_ok()
            && !answer.is_empty()
    });
    answer
}
