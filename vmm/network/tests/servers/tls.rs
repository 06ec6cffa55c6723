//! TLS that is passed through.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use exocell_network::Secrets;
use exocell_network::guard::Guard;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, HandshakeKind};

use super::certificates::{Certificates, OF_OTHER};
use super::fleet::Fleet;
use super::hellos::{self, Hello};
use super::mutants::Mutants;
use super::{NAME, passed};

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: granted.test\r\nConnection: close\r\n\r\n";

fn client(config: &Arc<ClientConfig>, name: &'static str) -> ClientConnection {
    ClientConnection::new(config.clone(), name.try_into().unwrap()).unwrap()
}

/// Has `client` make a request of a server through a guard; how it shook hands.
fn through_a_guard(mut client: ClientConnection, socket: &Path) -> Option<HandshakeKind> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
    let mut guard = Guard::of(NAME, 443, Secrets::default(), None);
    let (mut heard, mut piece, mut has_asked) = (Vec::new(), [0; 1000], false);
    loop {
        let mut said = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut said).unwrap();
        }
        guard.hold(&said).expect("an honest client");
        // A server that has said all need not hear more.
        let _ = stream.write_all(&guard.passed());
        let count = stream.read(&mut piece).unwrap_or(0);
        if count == 0 {
            break;
        }
        guard.answered(&piece[..count]).expect("an honest server");
        let mut answer = &piece[..count];
        while !answer.is_empty() {
            client.read_tls(&mut answer).unwrap();
            client.process_new_packets().unwrap();
        }
        let _ = client.reader().read_to_end(&mut heard);
        // Some keep the connection open.
        if !heard.is_empty() {
            break;
        }
        if !client.is_handshaking() && !std::mem::replace(&mut has_asked, true) {
            client.writer().write_all(REQUEST).unwrap();
        }
    }
    assert!(heard.starts_with(b"HTTP/1."), "{}", String::from_utf8_lossy(&heard));
    assert!(guard.is_open(), "nothing is held back any more");
    client.handshake_kind()
}

#[test]
fn honest_handshakes_are_served_by_all() {
    let certificates = Certificates::new();
    let fleet = Fleet::of_tls(&certificates);
    for (server, socket) in fleet.servers() {
        for versions in [&[&TLS12][..], &[&TLS13], &[&TLS12, &TLS13]] {
            let config = certificates.client(versions);
            let kinds: Vec<_> =
                (0..2).map(|_| through_a_guard(client(&config, NAME), socket)).collect();
            println!("{server}: {kinds:?}");
            assert_eq!(kinds[0], Some(HandshakeKind::Full), "{server}");
        }
    }
}

#[test]
fn a_server_that_asks_again_is_answered() {
    let certificates = Certificates::new();
    let fleet = Fleet::that_asks_again(&certificates);
    let config = certificates.client(&[&TLS13]);
    let kind = through_a_guard(client(&config, NAME), &fleet.servers()[0].1);
    assert_eq!(kind, Some(HandshakeKind::FullWithHelloRetryRequest));
}

/// Clients of TLS 1.2, where the certificate that the server has chosen can be seen.
fn first_words(certificates: &Certificates) -> Vec<Hello> {
    let config = certificates.client(&[&TLS12]);
    let first = |name| {
        let mut said = Vec::new();
        client(&config, name).write_tls(&mut said).unwrap();
        Hello::read(&said)
    };
    vec![first(NAME), first("other.test")]
}

#[test]
fn no_mutant_of_a_hello_gets_another_certificate() {
    let certificates = Certificates::new();
    let fleet = Fleet::of_tls(&certificates);
    let hellos = first_words(&certificates);
    let is_other = |answer: &[u8]| answer.windows(OF_OTHER.len()).any(|part| part == OF_OTHER);
    let mut mutants = Mutants::new(vec![vec![]], &[]);
    let (mut asked, mut without) = (0, std::collections::HashMap::new());
    for count in 0..super::mutants() / 10 {
        let mutant = hellos::mutant(&hellos, &mut mutants);
        let (through, _) = passed(&mutant, 443);
        asked += usize::from(!through.is_empty());
        if count % 20 == 0 {
            for (server, answer) in fleet.ask(&mutant) {
                *without.entry(server).or_insert(0) += usize::from(is_other(&answer));
            }
        }
        if through.is_empty() {
            continue;
        }
        for (server, answer) in fleet.ask(&through) {
            assert!(!is_other(&answer), "{server} takes {} for another", mutant.escape_ascii());
        }
    }
    println!("{asked} asked; without the guard, of every twentieth: {without:?}");
    assert!(asked > super::mutants() / 400, "{asked}");
    assert!(without.values().all(|count| *count > 0), "{without:?}");
    assert_eq!(without.len(), fleet.len());
}
