//! Turns names into addresses on the host side: /etc/hosts first, then the
//! host's name servers over UDP, and TCP for what UDP has no room for, without
//! ever waiting.
//!
//! ```text
//! start -> [cache, hosts] -> answer
//!       -> A and AAAA to server 1 -> server 2 -> ... -> answer or nothing
//! ```
//! A server that says that it cannot tell is like one that says nothing, but the next one is
//! asked at once.
//!
//! Each question has a socket and a number of its own, both at random, so that
//! a forged answer must guess them (RFC 5452).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use exocell_xgate::Protocol;
use nix::poll::PollFlags;

use super::hosts::Hosts;
use super::{is_passing, sys};
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

/// Bytes of the longest answer that comes over TCP.
const STREAM_BYTES_MAX: usize = 16 << 10;

/// One family's question, under way.
struct Half {
    server: SocketAddr,
    socket: OwnedFd,
    id: u16,
    message: Vec<u8>,
    /// Where the answer comes over TCP.
    stream: Option<Stream>,
    answer: Answer,
}

enum Answer {
    Awaited,
    /// None where there are none.
    Known(Vec<IpAddr>),
    /// The server cannot tell.
    Failed,
}

/// A question over TCP.
struct Stream {
    unsaid: Vec<u8>,
    heard: Vec<u8>,
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

    /// The sockets on which something may come, and what.
    pub fn watched(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let halves = self.questions.iter().flat_map(|question| &question.halves);
        halves.filter(|half| half.is_awaited()).map(|half| (half.socket.as_fd(), half.awaits()))
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
        let done: Vec<Question> =
            self.questions.extract_if(.., |question| question.is_done()).collect();
        done.into_iter().filter_map(|question| self.finish(question)).collect()
    }

    /// Goes on to the next server, or gives up, where one took too long.
    pub fn expire(&mut self) -> Vec<Resolved> {
        let now = Instant::now();
        let late: Vec<Question> =
            self.questions.extract_if(.., |question| question.until <= now).collect();
        late.into_iter().filter_map(|question| self.finish(question)).collect()
    }

    /// What came of a question; `None` where the next server is asked.
    fn finish(&mut self, question: Question) -> Option<Resolved> {
        // One family's answer is better than none.
        let (addresses, is_done, name) = (question.addresses(), question.is_done(), question.name);
        let is_known = question.halves.iter().all(|half| matches!(half.answer, Answer::Known(_)));
        if addresses.is_empty() && !is_known {
            let Some(next) = self.ask(&name, question.attempt + 1) else {
                return Some((name, addresses));
            };
            self.questions.push(next);
            return None;
        }
        if !addresses.is_empty() && is_done {
            if self.cache.len() >= CACHE_MAX {
                self.cache.clear();
            }
            let until = Instant::now() + Duration::from_secs(question.ttl_s.into());
            self.cache.insert(name.clone(), (until, addresses.clone()));
        }
        Some((name, addresses))
    }
}

impl Question {
    fn read(&mut self) {
        for (half, v6) in self.halves.iter_mut().zip([false, true]) {
            while half.is_awaited() {
                let message = match half.receive() {
                    Ok(message) => message,
                    Err(error) if is_passing(&error) => break,
                    // Nobody serves names there, or no longer.
                    Err(_) => {
                        half.answer = Answer::Failed;
                        break;
                    }
                };
                let is_stream = half.stream.is_some();
                match dns::found(&message, half.id, &self.name, v6) {
                    Some(dns::Answer::Found(found)) => {
                        self.ttl_s = self.ttl_s.min(found.ttl_s);
                        half.answer = Answer::Known(found.addresses);
                    }
                    Some(dns::Answer::Truncated) if !is_stream && half.use_stream().is_ok() => {
                        self.until = Instant::now() + PATIENCE;
                    }
                    // Anybody can send a datagram that answers nothing.
                    None if !is_stream => {}
                    _ => half.answer = Answer::Failed,
                }
            }
        }
    }

    fn is_done(&self) -> bool {
        self.halves.iter().all(|half| !half.is_awaited())
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let known = |half: &Half| match &half.answer {
            Answer::Known(addresses) => addresses.clone(),
            Answer::Awaited | Answer::Failed => Vec::new(),
        };
        self.halves.iter().flat_map(known).take(ADDRESSES_MAX).collect()
    }
}

impl Half {
    fn is_awaited(&self) -> bool {
        matches!(self.answer, Answer::Awaited)
    }

    fn awaits(&self) -> PollFlags {
        match &self.stream {
            Some(stream) if !stream.unsaid.is_empty() => PollFlags::POLLOUT,
            _ => PollFlags::POLLIN,
        }
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        if let Some(stream) = &mut self.stream {
            return stream.receive(self.socket.as_fd());
        }
        let mut buffer = [0; dns::MESSAGE_BYTES_MAX];
        let bytes = sys::receive(self.socket.as_fd(), &mut buffer)?;
        Ok(buffer.get(..bytes).unwrap_or_default().to_vec())
    }

    /// Asks again, over TCP.
    fn use_stream(&mut self) -> io::Result<()> {
        let length = u16::try_from(self.message.len()).map_err(io::Error::other)?;
        let unsaid = [&length.to_be_bytes()[..], &self.message].concat();
        self.socket = sys::start(Protocol::Tcp, self.server, false)?.0;
        self.stream = Some(Stream { unsaid, heard: Vec::new() });
        Ok(())
    }
}

impl Stream {
    /// The answer, once all of it has come.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
        if !self.unsaid.is_empty() {
            // So little goes as a whole or not at all.
            sys::send(socket, &self.unsaid)?;
            self.unsaid.clear();
        }
        let mut buffer = [0; dns::MESSAGE_BYTES_MAX];
        loop {
            if let Some((length, rest)) = self.heard.split_first_chunk()
                && let Some(message) = rest.get(..usize::from(u16::from_be_bytes(*length)))
            {
                return Ok(message.to_vec());
            }
            let bytes = sys::receive(socket, &mut buffer)?;
            if bytes == 0 || self.heard.len() > STREAM_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.heard.extend_from_slice(buffer.get(..bytes).unwrap_or_default());
        }
    }
}

fn half(server: SocketAddr, name: &str, v6: bool) -> io::Result<Half> {
    let id = sys::random_u16()?;
    let message = dns::query(id, name, v6).ok_or(io::ErrorKind::InvalidInput)?;
    let socket = sys::udp(server)?;
    sys::send(socket.as_fd(), &message)?;
    Ok(Half { server, socket, id, message, stream: None, answer: Answer::Awaited })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, UdpSocket};

    use simple_dns::rdata::{A, RData};
    use simple_dns::{CLASS, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE};

    fn resolver(server: &UdpSocket) -> Resolver {
        Resolver::new(Hosts::asking(&[server.local_addr().unwrap()]))
    }

    /// What a server says to a question for A; to one for AAAA it has no address.
    #[derive(Clone, Copy, PartialEq)]
    enum Says {
        Address,
        /// After a forged answer.
        AddressToo,
        /// To AAAA it says that it cannot tell.
        AddressOnly,
        Code(RCODE),
        Truncated,
    }

    fn answer(question: &[u8], says: Says) -> Vec<u8> {
        let asked = Packet::parse(question).unwrap();
        let mut reply = Packet::new_reply(asked.id());
        reply.questions = asked.questions.clone();
        let is_v4 = asked.questions[0].qtype == QTYPE::TYPE(TYPE::A);
        match says {
            Says::Code(code) => *reply.rcode_mut() = code,
            Says::Truncated => reply.set_flags(PacketFlag::TRUNCATION),
            Says::AddressOnly if !is_v4 => *reply.rcode_mut() = RCODE::ServerFailure,
            _ if is_v4 => {
                let name = asked.questions[0].qname.clone();
                let data = RData::A(A { address: 0xc000_0207 });
                reply.answers.push(ResourceRecord::new(name, CLASS::IN, 60, data));
            }
            _ => {}
        }
        reply.build_bytes_vec().unwrap()
    }

    /// Answers `count` questions.
    fn serve(server: &UdpSocket, count: usize, says: Says) {
        let mut buffer = [0; 512];
        for _ in 0..count {
            let (bytes, from) = server.recv_from(&mut buffer).unwrap();
            let reply = answer(&buffer[..bytes], says);
            if says == Says::AddressToo {
                let mut forged = reply.clone();
                forged[0] ^= 0xff;
                server.send_to(&forged, from).unwrap();
            }
            server.send_to(&reply, from).unwrap();
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
        let answering = std::thread::spawn(move || serve(&server, 2, Says::AddressToo));
        let address: IpAddr = "192.0.2.7".parse().unwrap();
        assert_eq!(finish(&mut resolver), [("a.test".to_owned(), vec![address])]);
        answering.join().unwrap();
        assert_eq!(resolver.start("a.test"), Outcome::Now(vec![address]));
    }

    /// The name, asked of `servers`, of which none may be waited for until it is late.
    fn resolved_in_time(servers: &[SocketAddr]) -> Vec<IpAddr> {
        let mut resolver = Resolver::new(Hosts::asking(servers));
        assert_eq!(resolver.start("a.test"), Outcome::Later);
        loop {
            if let Some((_, addresses)) = resolver.ready().pop() {
                return addresses;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn address() -> IpAddr {
        "192.0.2.7".parse().unwrap()
    }

    #[test]
    fn where_a_server_cannot_tell_the_next_is_asked_at_once() {
        for code in [RCODE::ServerFailure, RCODE::Refused, RCODE::NotImplemented] {
            let servers = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
            let at = servers.each_ref().map(|server| server.local_addr().unwrap());
            let [one, two] = servers;
            std::thread::spawn(move || serve(&one, 2, Says::Code(code)));
            std::thread::spawn(move || serve(&two, 2, Says::Address));
            assert_eq!(resolved_in_time(&at), [address()], "{code:?}");
        }
    }

    #[test]
    fn where_nobody_serves_names_the_next_server_is_asked_at_once() {
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = [nobody, server.local_addr().unwrap()];
        std::thread::spawn(move || serve(&server, 2, Says::Address));
        assert_eq!(resolved_in_time(&at), [address()]);
    }

    #[test]
    fn one_familys_addresses_need_not_the_others() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = server.local_addr().unwrap();
        std::thread::spawn(move || serve(&server, 2, Says::AddressOnly));
        assert_eq!(resolved_in_time(&[at]), [address()]);
    }

    #[test]
    fn a_name_that_is_none_is_asked_for_no_more() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = [&server, &silent].map(|server| server.local_addr().unwrap());
        std::thread::spawn(move || serve(&server, 2, Says::Code(RCODE::NameError)));
        assert_eq!(resolved_in_time(&at), [] as [IpAddr; 0]);
    }

    #[test]
    fn what_a_datagram_has_no_room_for_comes_over_tcp() {
        // Of both kinds at once; another test may have the one where this has the other.
        let both = || {
            let stream = TcpListener::bind("127.0.0.1:0").unwrap();
            let datagrams = UdpSocket::bind(stream.local_addr().unwrap()).ok()?;
            Some((stream, datagrams))
        };
        let (stream, datagrams) = (0..100).find_map(|_| both()).unwrap();
        let at = stream.local_addr().unwrap();
        std::thread::spawn(move || serve(&datagrams, 2, Says::Truncated));
        std::thread::spawn(move || {
            for _ in 0..2 {
                let mut asker = stream.accept().unwrap().0;
                let mut length = [0; 2];
                asker.read_exact(&mut length).unwrap();
                let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
                asker.read_exact(&mut question).unwrap();
                let reply = answer(&question, Says::Address);
                // In two parts, as it may come.
                asker.write_all(&(reply.len() as u16).to_be_bytes()).unwrap();
                asker.write_all(&reply).unwrap();
            }
        });
        assert_eq!(resolved_in_time(&[at]), [address()]);
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
