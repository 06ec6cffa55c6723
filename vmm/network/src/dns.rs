//! DNS messages: the guest's questions and our answers, the host's questions
//! and its servers' answers (RFC 1035). Parsing is `simple-dns`'s.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use simple_dns::rdata::{A, AAAA, RData};
use simple_dns::{
    CLASS, Name, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, ResourceRecord, TYPE,
};

use crate::names::Names;
use crate::policy::Policy;

/// Bytes of the longest message taken: EDNS(0)'s usual limit.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Seconds that an answer may be kept. Short, so that a change of the rules shows.
const TTL_S: u32 = 30;
/// Links of an alias chain that are followed.
const ALIASES_MAX: usize = 16;

/// What the guest asked: one question, its name in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    id: u16,
    kind: u16,
    /// As the guest spelled it; resolvers compare (draft "0x20").
    spelled: String,
    pub name: String,
}

/// What is to be done with a message of the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Not a question: no answer at all.
    Ignore,
    /// Send this; `name` is what was asked for and `granted` what was found.
    Answer { bytes: Vec<u8>, name: String, granted: bool },
    /// The host shall resolve it first; [`resolved`] makes the answer.
    Resolve(Asked),
}

/// The answer to a question for one who shares a network with the guest; `find` knows them.
pub fn neighbour(
    message: &[u8],
    find: impl FnOnce(&str) -> Option<Vec<IpAddr>>,
) -> Option<Reaction> {
    let asked = question(message)?;
    let bytes = answer(&asked, &find(&asked.name)?);
    Some(Reaction::Answer { bytes, name: asked.name, granted: true })
}

/// Reacts to a message of the guest without asking anybody.
pub fn react(message: &[u8], policy: &Policy, names: &mut Names) -> Reaction {
    let Some(asked) = question(message) else { return Reaction::Ignore };
    if policy.knows(&asked.name) {
        let (v4, v6) = names.addresses(&asked.name);
        let bytes = answer(&asked, &[v4.into(), v6.into()]);
        return Reaction::Answer { bytes, name: asked.name, granted: true };
    }
    if policy.resolves(&asked.name) {
        return Reaction::Resolve(asked);
    }
    let bytes = reply(&asked, RCODE::NameError, &[]);
    Reaction::Answer { bytes, name: asked.name, granted: false }
}

/// The answer to a name that the host resolved, or could not.
pub fn resolved(asked: &Asked, addresses: Option<&[IpAddr]>) -> Vec<u8> {
    match addresses {
        Some(addresses) => answer(asked, addresses),
        None => reply(asked, RCODE::NameError, &[]),
    }
}

fn answer(asked: &Asked, addresses: &[IpAddr]) -> Vec<u8> {
    let wanted = |address: &&IpAddr| match address {
        IpAddr::V4(_) => asked.kind == u16::from(TYPE::A),
        IpAddr::V6(_) => asked.kind == u16::from(TYPE::AAAA),
    };
    let addresses: Vec<IpAddr> = addresses.iter().filter(wanted).copied().take(16).collect();
    // A name that is there but has no record of the kind asked for.
    reply(asked, RCODE::NoError, &addresses)
}

fn reply(asked: &Asked, code: RCODE, addresses: &[IpAddr]) -> Vec<u8> {
    let mut packet = Packet::new_reply(asked.id);
    packet.set_flags(PacketFlag::RECURSION_AVAILABLE | PacketFlag::RECURSION_DESIRED);
    *packet.rcode_mut() = code;
    let name = Name::new_unchecked(&asked.spelled);
    if let Ok(kind) = QTYPE::try_from(asked.kind) {
        packet.questions.push(Question::new(name.clone(), kind, CLASS::IN.into(), false));
    }
    for address in addresses {
        let data = match address {
            IpAddr::V4(address) => RData::A(A { address: address.to_bits() }),
            IpAddr::V6(address) => RData::AAAA(AAAA { address: address.to_bits() }),
        };
        packet.answers.push(ResourceRecord::new(name.clone(), CLASS::IN, TTL_S, data));
    }
    packet.build_bytes_vec_compressed().unwrap_or_default()
}

/// The one question of a query of class IN; anything else is no question of ours.
fn question(message: &[u8]) -> Option<Asked> {
    if message.len() > MESSAGE_BYTES_MAX {
        return None;
    }
    let packet = Packet::parse(message).ok()?;
    if packet.has_flags(PacketFlag::RESPONSE) || packet.opcode() != OPCODE::StandardQuery {
        return None;
    }
    let [question] = packet.questions.as_slice() else { return None };
    if question.qclass != QCLASS::CLASS(CLASS::IN) {
        return None;
    }
    let spelled = host_name(&question.qname).unwrap_or_default();
    let name = spelled.to_ascii_lowercase();
    Some(Asked { id: packet.id(), kind: question.qtype.into(), spelled, name })
}

/// The name with dots between its labels; `None` where a label holds anything
/// that could be taken for something else.
fn host_name(name: &Name<'_>) -> Option<String> {
    let mut text = String::new();
    for label in name.as_bytes() {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-' || *byte == b'_';
        if !label.iter().all(plain) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(std::str::from_utf8(label).ok()?);
    }
    (text.len() <= 253).then_some(text)
}

/// A question of the host for a name's addresses.
pub fn query(id: u16, name: &str, v6: bool) -> Option<Vec<u8>> {
    let kind = if v6 { TYPE::AAAA } else { TYPE::A };
    let mut packet = Packet::new_query(id);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new(name).ok()?;
    packet.questions.push(Question::new(name, kind.into(), CLASS::IN.into(), false));
    packet.build_bytes_vec().ok()
}

/// What a server answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Found(Found),
    /// A datagram has no room for it; a stream has.
    Truncated,
    /// The server cannot tell. Another one may.
    Failed,
}

/// What a server said of a name: no addresses where it has none, or there is no such name.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    pub addresses: Vec<IpAddr>,
    /// Seconds for which all of it holds.
    pub ttl_s: u32,
}

/// A server's answer to the question `id` for `name`, with the addresses of the name itself
/// and of what it is an alias of. `None` where the message does not answer that question.
pub fn found(message: &[u8], id: u16, name: &str, v6: bool) -> Option<Answer> {
    let packet = Packet::parse(message).ok()?;
    let kind = QTYPE::TYPE(if v6 { TYPE::AAAA } else { TYPE::A });
    let tells = matches!(packet.rcode(), RCODE::NoError | RCODE::NameError);
    let asked = match packet.questions.as_slice() {
        [question] => {
            let is_name = host_name(&question.qname)?.eq_ignore_ascii_case(name);
            let is_in = question.qclass == QCLASS::CLASS(CLASS::IN);
            is_name && is_in && question.qtype == kind
        }
        // A server that does not understand a question need not repeat it.
        [] => !tells,
        _ => false,
    };
    if !packet.has_flags(PacketFlag::RESPONSE) || packet.id() != id || !asked {
        return None;
    }
    if !tells {
        return Some(Answer::Failed);
    }
    let mut known = vec![name.to_ascii_lowercase()];
    let mut found = Found { addresses: Vec::new(), ttl_s: u32::MAX };
    for record in &packet.answers {
        let Some(owner) = host_name(&record.name) else { continue };
        if record.class != CLASS::IN || !known.contains(&owner.to_ascii_lowercase()) {
            continue;
        }
        match &record.rdata {
            RData::CNAME(alias) if known.len() < ALIASES_MAX => {
                known.extend(host_name(&alias.0).map(|name| name.to_ascii_lowercase()));
            }
            RData::A(a) if !v6 => found.addresses.push(Ipv4Addr::from(a.address).into()),
            RData::AAAA(aaaa) if v6 => found.addresses.push(Ipv6Addr::from(aaaa.address).into()),
            _ => continue,
        }
        found.ttl_s = found.ttl_s.min(record.ttl);
    }
    let is_short = packet.has_flags(PacketFlag::TRUNCATION) && found.addresses.is_empty();
    Some(if is_short { Answer::Truncated } else { Answer::Found(found) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_xgate::NetworkScope;
    use proptest::prelude::*;

    fn policy(connect: &[&str], resolve: &[&str]) -> Policy {
        Policy::new(NetworkScope {
            connect: connect.iter().map(|rule| rule.parse().unwrap()).collect(),
            resolve: resolve.iter().map(|rule| rule.parse().unwrap()).collect(),
            ..NetworkScope::default()
        })
    }

    fn answered(name: &str, v6: bool, policy: &Policy) -> (RCODE, Vec<IpAddr>) {
        let message = query(7, name, v6).unwrap();
        match react(&message, policy, &mut Names::default()) {
            Reaction::Answer { bytes, .. } => {
                let code = Packet::parse(&bytes).unwrap().rcode();
                (code, addresses(&bytes, 7, name, v6).addresses)
            }
            other => panic!("{other:?}"),
        }
    }

    fn addresses(message: &[u8], id: u16, name: &str, v6: bool) -> Found {
        match found(message, id, name, v6) {
            Some(Answer::Found(found)) => found,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn granted_names_get_addresses_that_stand_for_them() {
        let policy = policy(&["Example.org:443", "*.wild.test:1/udp"], &[]);
        let one = IpAddr::V4(link_v4());
        assert_eq!(answered("example.org", false, &policy), (RCODE::NoError, vec![one]));
        assert_eq!(answered("EXAMPLE.org", false, &policy), (RCODE::NoError, vec![one]));
        assert_eq!(answered("a.wild.test", true, &policy).1.len(), 1);
        for name in ["a.example.org", "wild.test", "example.com", "org", "localhost"] {
            assert_eq!(answered(name, false, &policy), (RCODE::NameError, vec![]), "{name}");
        }
    }

    fn link_v4() -> Ipv4Addr {
        crate::link::NAMES_V4
    }

    #[test]
    fn names_to_resolve_go_to_the_host_and_others_never_do() {
        let policy = policy(&[], &["*.test"]);
        let message = query(9, "a.test", false).unwrap();
        let Reaction::Resolve(asked) = react(&message, &policy, &mut Names::default()) else {
            panic!("it is to be resolved");
        };
        let real: IpAddr = "192.0.2.7".parse().unwrap();
        let bytes = resolved(&asked, Some(&[real, "::1".parse().unwrap()]));
        assert_eq!(addresses(&bytes, 9, "a.test", false).addresses, [real]);
        assert_eq!(Packet::parse(&resolved(&asked, None)).unwrap().rcode(), RCODE::NameError);
    }

    #[test]
    fn a_granted_name_has_no_records_but_addresses() {
        let mut message = query(1, "example.org", false).unwrap();
        let at = message.len() - 3;
        message[at] = 16; // TXT
        let policy = policy(&["example.org:443"], &[]);
        match react(&message, &policy, &mut Names::default()) {
            Reaction::Answer { bytes, .. } => {
                let packet = Packet::parse(&bytes).unwrap();
                assert_eq!((packet.rcode(), packet.answers.len()), (RCODE::NoError, 0));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn aliases_are_followed_and_strangers_are_not() {
        let mut packet = Packet::new_reply(3);
        let name = |text: &'static str| Name::new_unchecked(text);
        packet.questions.push(Question::new(
            name("a.test"),
            TYPE::A.into(),
            CLASS::IN.into(),
            false,
        ));
        let record = |owner, data| ResourceRecord::new(name(owner), CLASS::IN, 5, data);
        let alias = RData::CNAME(simple_dns::rdata::CNAME(name("b.test")));
        packet.answers.push(record("a.test", alias));
        packet.answers.push(record("b.test", RData::A(A { address: 0xc000_0201 })));
        packet.answers.push(record("evil.test", RData::A(A { address: 0x7f00_0001 })));
        let mut other_class = record("a.test", RData::A(A { address: 0x7f00_0001 }));
        other_class.class = CLASS::CH;
        packet.answers.push(other_class);
        let bytes = packet.build_bytes_vec().unwrap();
        let found_it = addresses(&bytes, 3, "a.test", false);
        assert_eq!(found_it.addresses, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(found_it.ttl_s, 5);
        assert_eq!(found(&bytes, 4, "a.test", false), None);
        assert_eq!(found(&bytes, 3, "b.test", false), None);
        assert_eq!(found(&bytes, 3, "a.test", true), None);
    }

    #[test]
    fn a_server_that_cannot_tell_has_not_said_that_there_is_no_such_name() {
        let mut packet = Packet::new_reply(3);
        let question = |kind: TYPE, class: CLASS| {
            Question::new(Name::new_unchecked("a.test"), kind.into(), class.into(), false)
        };
        packet.questions.push(question(TYPE::A, CLASS::IN));
        let none = Some(Answer::Found(Found { addresses: vec![], ttl_s: u32::MAX }));
        let answer =
            |packet: &Packet| found(&packet.build_bytes_vec().unwrap(), 3, "a.test", false);
        for (code, said) in [
            (RCODE::NoError, &none),
            (RCODE::NameError, &none),
            (RCODE::FormatError, &Some(Answer::Failed)),
            (RCODE::ServerFailure, &Some(Answer::Failed)),
            (RCODE::NotImplemented, &Some(Answer::Failed)),
            (RCODE::Refused, &Some(Answer::Failed)),
        ] {
            *packet.rcode_mut() = code;
            assert_eq!(&answer(&packet), said, "{code:?}");
        }
        packet.questions.clear();
        assert_eq!(answer(&packet), Some(Answer::Failed));
        *packet.rcode_mut() = RCODE::NoError;
        assert_eq!(answer(&packet), None);
        packet.questions.push(question(TYPE::A, CLASS::CH));
        assert_eq!(answer(&packet), None);
        packet.questions = vec![question(TYPE::A, CLASS::IN)];
        packet.set_flags(PacketFlag::TRUNCATION);
        assert_eq!(answer(&packet), Some(Answer::Truncated));
    }

    #[test]
    fn what_is_not_a_question_is_ignored() {
        let policy = policy(&["*:443"], &["*"]);
        let answer = answered_bytes();
        for message in [&b""[..], b"\0\0", &[0xff; 100], &answer, &[0; 5000]] {
            assert_eq!(react(message, &policy, &mut Names::default()), Reaction::Ignore);
        }
    }

    fn answered_bytes() -> Vec<u8> {
        let asked = Asked { id: 1, kind: 1, spelled: "a.b".into(), name: "a.b".into() };
        reply(&asked, RCODE::NoError, &["192.0.2.1".parse().unwrap()])
    }

    proptest! {
        #[test]
        fn no_message_panics(message: Vec<u8>) {
            let policy = policy(&["*:443"], &["*"]);
            let _ = react(&message, &policy, &mut Names::default());
            let _ = found(&message, 0, "a", false);
        }
    }
}
