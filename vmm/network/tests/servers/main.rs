//! The guard's verdict beside what real servers take the same bytes for: whatever of a
//! stream it lets through, no server serves it for another name.
//!
//! ```text
//! corpus, mutants ─> guard ── what may go on ──> nginx, haproxy, Go, Python, gunicorn, h11,
//!                                                hyper; TLS also OpenSSL
//! each server: "[[granted.test]]" for that host, something else for any other
//! ```
//! `EXOCELL_GUARD_MUTANTS` is the number of mutants of each kind.

mod certificates;
mod corpus;
mod fleet;
mod hellos;
mod mutants;
mod tls;
mod web;

use std::collections::HashSet;

use exocell_network::Secrets;
use exocell_network::guard::Guard;
use fleet::Fleet;
use mutants::Mutants;

const NAME: &str = "granted.test";
const MUTANTS: usize = 20_000;

fn mutants() -> usize {
    let asked = std::env::var("EXOCELL_GUARD_MUTANTS").ok();
    asked.map_or(MUTANTS, |text| text.parse().expect("a number of mutants"))
}

/// What of `bytes` goes on to a server, if they come one by one: what may go on goes at once.
fn passed(bytes: &[u8], port: u16) -> (Vec<u8>, bool) {
    let mut guard = Guard::of(NAME, port, Secrets::default(), None);
    let mut through = Vec::new();
    for byte in bytes {
        let judged = guard.hold(&[*byte]);
        through.extend(guard.passed());
        if judged.is_err() {
            return (through, false);
        }
    }
    (through, true)
}

#[test]
fn what_honest_clients_say_is_served_by_all() {
    let fleet = Fleet::of_http();
    for (text, requests) in corpus::honest() {
        let (through, is_whole) = passed(text.as_bytes(), 80);
        assert!(is_whole, "refused: {text}");
        for (server, answer) in fleet.ask(&through) {
            let served = fleet::served(&answer);
            assert!(
                served.iter().all(|host| fleet::is_granted(host)),
                "{server}: {text}: {served:?}"
            );
            assert!(served.len() <= requests, "{server} serves more: {text}: {served:?}");
            assert!(!served.is_empty(), "{server} serves none: {text}: {}", shown(&answer));
        }
    }
}

/// The corpus is worth something: without the guard most of it is served for another name by
/// somebody, and each server serves some of it.
#[test]
fn lies_are_served_for_another_name_where_there_is_no_guard() {
    let fleet = Fleet::of_http();
    let lies = corpus::lies();
    let mut taken_in: HashSet<&str> = HashSet::new();
    let mut served = 0;
    for lie in &lies {
        let others = fleet.ask(lie).into_iter().filter(|(_, answer)| !is_for_granted(answer));
        let others: Vec<&str> = others.map(|(server, _)| server).collect();
        served += usize::from(!others.is_empty());
        taken_in.extend(others);
        let (through, _) = passed(lie, 80);
        check(&fleet, &through, lie);
    }
    println!("{served} of {} lies are served for another name by {taken_in:?}", lies.len());
    assert!(served * 2 > lies.len(), "{served} of {}", lies.len());
    assert_eq!(taken_in.len(), fleet.len(), "{taken_in:?}");
}

#[test]
fn no_mutant_of_a_request_is_served_for_another_name() {
    let fleet = Fleet::of_http();
    let mut seeds = corpus::lies();
    // Little of what lies are changed to goes on, so honest words are changed more often.
    let honest = corpus::honest().into_iter().map(|(text, _)| text.into_bytes());
    let honest: Vec<Vec<u8>> = honest.collect();
    (0..20).for_each(|_| seeds.extend(honest.clone()));
    let mut mutants = Mutants::new(seeds, corpus::WORDS);
    let (mut known, mut refused) = (HashSet::new(), 0);
    for _ in 0..self::mutants() {
        let mutant = mutants.next_mutant();
        let (through, is_whole) = passed(&mutant, 80);
        refused += usize::from(!is_whole);
        if !through.is_empty() && known.insert(through.clone()) {
            check(&fleet, &through, &mutant);
        }
    }
    println!("{refused} of {} mutants refused, {} asked", self::mutants(), known.len());
    assert!(known.len() * 20 > self::mutants(), "only {} passed", known.len());
}

#[track_caller]
fn check(fleet: &Fleet, through: &[u8], said: &[u8]) {
    for (server, answer) in fleet.ask(through) {
        assert!(
            is_for_granted(&answer),
            "{server} serves another name:\n{}\nsaid:\n{}\nthrough:\n{}",
            shown(&answer),
            shown(said),
            shown(through)
        );
    }
}

fn is_for_granted(answer: &[u8]) -> bool {
    fleet::served(answer).iter().all(|host| fleet::is_granted(host))
}

fn shown(bytes: &[u8]) -> String {
    bytes.get(..bytes.len().min(2000)).unwrap_or_default().escape_ascii().to_string()
}
