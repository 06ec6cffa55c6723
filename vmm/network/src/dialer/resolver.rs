//! Turns names into addresses on the host side: /etc/hosts first, then the
//! host's name servers over UDP, without ever waiting.
//!
//! ```text
//! start -> [cache, hosts] -> answer
//!       -> A and AAAA to server 1 -> server 2 -> ... -> answer or nothing
//! ```
//! Each question has a socket and a number of its own, both at random, so that
//! a forged answer must guess them (RFC 5452).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::hosts::Hosts;
use super::sys;
use crate::dns;

/// How long a server has for its answer.
const PATIENCE: Duration = Duration::from_millis(2500);
/// How often each server is asked.
const ROUNDS: usize = 2;
/// Answers kept; the cache is emptied when it is full.
const CACHE_MAX: usize = 512;
/// How long an answer is kept, whatever it says itself.
const KEPT_S_MAX: u32 = 60;
/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 16;
/// Names that may be asked for at once.
const QUESTIONS_MAX: usize = 128;

/// One family's question, under way.
struct Half {
    socket: OwnedFd,
    id: u16,
    answer: Option<Vec<IpAddr>>,
}

struct Question {
    name: String,
    /// Server and round: counts up.
    attempt: usize,
    until: Instant,
    halves: [Half; 2],
    ttl_s: u32,
}

/// What becomes of a name.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Now; empty where there is no such name.
    Now(Vec<IpAddr>),
    /// [`Resolver::ready`] or [`Resolver::expire`] will tell.
    Later,
    /// Too many names at once.
    Busy,
}

/// A name that was resolved; no addresses where it cannot be.
pub type Resolved = (String, Vec<IpAddr>);

/// All questions of one dialer.
pub struct Resolver {
    hosts: Hosts,
    cache: HashMap<String, (Instant, Vec<IpAddr>)>,
    questions: Vec<Question>,
}

impl Resolver {
    pub fn new(hosts: Hosts) -> Self {
        Self { hosts, cache: HashMap::new(), questions: Vec::new() }
    }

    /// Starts to resolve `name`, in lower case.
    pub fn start(&mut self, name: &str) -> Outcome {
        if let Some(addresses) = self.hosts.known(name) {
            return Outcome::Now(addresses.to_vec());
        }
        if let Some((until, addresses)) = self.cache.get(name)
            && *until > Instant::now()
        {
            return Outcome::Now(addresses.clone());
        }
        if self.questions.iter().any(|question| question.name == name) {
            return Outcome::Later;
        }
        if self.questions.len() >= QUESTIONS_MAX {
            return Outcome::Busy;
        }
        match self.ask(name, 0) {
            Some(question) => {
                self.questions.push(question);
                Outcome::Later
            }
            None => Outcome::Now(Vec::new()),
        }
    }

    /// Asks the first server, from `attempt` on, that can be asked at all.
    fn ask(&self, name: &str, attempt: usize) -> Option<Question> {
        let servers = &self.hosts.servers;
        for attempt in attempt..servers.len() * ROUNDS {
            let server = *servers.get(attempt % servers.len())?;
            let (Ok(v4), Ok(v6)) = (half(server, name, false), half(server, name, true)) else {
                continue;
            };
            let until = Instant::now() + PATIENCE;
            let name = name.to_owned();
            return Some(Question { name, attempt, until, halves: [v4, v6], ttl_s: KEPT_S_MAX });
        }
        None
    }

    /// The sockets on which answers may come.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let halves = self.questions.iter().flat_map(|question| &question.halves);
        halves.filter(|half| half.answer.is_none()).map(|half| half.socket.as_fd())
    }

    /// When [`Self::expire`] has something to do.
    pub fn due(&self) -> Option<Instant> {
        self.questions.iter().map(|question| question.until).min()
    }

    /// Reads what has come.
    pub fn ready(&mut self) -> Vec<Resolved> {
        for question in &mut self.questions {
            question.read();
        }
        let mut done = Vec::new();
        for question in self.questions.extract_if(.., |question| question.is_answered()) {
            let until = Instant::now() + Duration::from_secs(question.ttl_s.into());
            let addresses = question.addresses();
            if self.cache.len() >= CACHE_MAX {
                self.cache.clear();
            }
            if !addresses.is_empty() {
                self.cache.insert(question.name.clone(), (until, addresses.clone()));
            }
            done.push((question.name, addresses));
        }
        done
    }

    /// Goes on to the next server, or gives up, where one took too long.
    pub fn expire(&mut self) -> Vec<Resolved> {
        let now = Instant::now();
        let late: Vec<Question> =
            self.questions.extract_if(.., |question| question.until <= now).collect();
        let mut given_up = Vec::new();
        for question in late {
            // One family's answer is better than none.
            let addresses = question.addresses();
            if !addresses.is_empty() {
                given_up.push((question.name, addresses));
                continue;
            }
            match self.ask(&question.name, question.attempt + 1) {
                Some(next) => self.questions.push(next),
                None => given_up.push((question.name, Vec::new())),
            }
        }
        given_up
    }
}

impl Question {
    fn read(&mut self) {
        let mut buffer = [0; dns::MESSAGE_BYTES_MAX];
        for (half, v6) in self.halves.iter_mut().zip([false, true]) {
            while half.answer.is_none() {
                let Ok(bytes) = sys::receive(half.socket.as_fd(), &mut buffer) else {
                    break;
                };
                let message = buffer.get(..bytes).unwrap_or_default();
                if let Some(found) = dns::found(message, half.id, &self.name, v6) {
                    self.ttl_s = self.ttl_s.min(found.ttl_s);
                    half.answer = Some(found.addresses);
                }
            }
        }
    }

    fn is_answered(&self) -> bool {
        self.halves.iter().all(|half| half.answer.is_some())
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let answers = self.halves.iter().filter_map(|half| half.answer.as_ref());
        answers.flatten().copied().take(ADDRESSES_MAX).collect()
    }
}

fn half(server: SocketAddr, name: &str, v6: bool) -> io::Result<Half> {
    let id = sys::random_u16()?;
    let message = dns::query(id, name, v6).ok_or(io::ErrorKind::InvalidInput)?;
    let socket = sys::udp(server)?;
    sys::send(socket.as_fd(), &message)?;
    Ok(Half { socket, id, answer: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    fn resolver(server: &UdpSocket) -> Resolver {
        Resolver::new(Hosts::asking(server.local_addr().unwrap()))
    }

    /// Answers `count` questions: the address for A, nothing for AAAA.
    fn serve(server: &UdpSocket, count: usize, forged_first: bool) {
        use simple_dns::rdata::{A, RData};
        use simple_dns::{CLASS, Packet, QTYPE, ResourceRecord, TYPE};
        let mut buffer = [0; 512];
        for _ in 0..count {
            let (bytes, from) = server.recv_from(&mut buffer).unwrap();
            let asked = Packet::parse(&buffer[..bytes]).unwrap();
            let mut reply = Packet::new_reply(asked.id());
            reply.questions = asked.questions.clone();
            if asked.questions[0].qtype == QTYPE::TYPE(TYPE::A) {
                let name = asked.questions[0].qname.clone();
                let data = RData::A(A { address: 0xc000_0207 });
                reply.answers.push(ResourceRecord::new(name, CLASS::IN, 60, data));
            }
            if forged_first {
                let mut forged = reply.build_bytes_vec().unwrap();
                forged[0] ^= 0xff;
                server.send_to(&forged, from).unwrap();
            }
            server.send_to(&reply.build_bytes_vec().unwrap(), from).unwrap();
        }
    }

    fn finish(resolver: &mut Resolver) -> Vec<Resolved> {
        loop {
            let done = [resolver.ready(), resolver.expire()].concat();
            if !done.is_empty() {
                return done;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_name_is_asked_for_once_and_kept() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut resolver = resolver(&server);
        assert_eq!(resolver.start("a.test"), Outcome::Later);
        assert_eq!(resolver.start("a.test"), Outcome::Later);
        let answering = std::thread::spawn(move || serve(&server, 2, true));
        let address: IpAddr = "192.0.2.7".parse().unwrap();
        assert_eq!(finish(&mut resolver), [("a.test".to_owned(), vec![address])]);
        answering.join().unwrap();
        assert_eq!(resolver.start("a.test"), Outcome::Now(vec![address]));
    }

    #[test]
    fn a_name_that_cannot_be_asked_for_is_none() {
        let mut resolver = Resolver::new(Hosts::default());
        assert_eq!(resolver.start("a.test"), Outcome::Now(vec![]));
    }

    #[test]
    fn names_under_way_are_bounded() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut resolver = resolver(&server);
        for index in 0..QUESTIONS_MAX {
            assert_eq!(resolver.start(&format!("{index}.test")), Outcome::Later);
        }
        assert_eq!(resolver.start("more.test"), Outcome::Busy);
    }
}
