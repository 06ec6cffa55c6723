//! The network of a `vm` cell: packets of a hostile guest kernel, and messages
//! about names from the guest and from the host's servers.

use exocell_network::names::Names;
use exocell_network::stack::{Changes, Parts, Stack};
use exocell_network::{Policy, dialer, dns};
use exocell_vmm::devices::Link;

use crate::Input;

/// Packets of one input.
const PACKETS_MAX: usize = 64;
const RULES: &str =
    "connect *.test:1-65535\nconnect 0.0.0.0/0:80\nconnect [::/0]/icmp\nresolve *\n";

fn policy() -> Policy {
    Policy::from_text(RULES).expect("well-formed rules")
}

/// A length and a packet of it, over and over; of every second packet the
/// fields that decide whether it is looked at at all are put right.
pub fn packets(bytes: &[u8]) {
    let (channel, _dialer) = dialer::sys::channel().expect("a channel");
    let parts = Parts {
        policy: policy(),
        channel,
        published: Vec::new(),
        audit: Box::new(drop),
        changes: Changes::pair().expect("an event").1,
        secrets: exocell_network::Secrets::default(),
        authority: None,
    };
    let mut stack = Stack::new(parts).expect("a stack");
    let mut input = Input::new(bytes);
    for count in 0..PACKETS_MAX {
        if input.is_empty() {
            break;
        }
        let length = usize::from(input.u16() % 2048);
        let mut packet = input.take(length).to_vec();
        if count % 2 == 0 {
            put_right(&mut packet);
        }
        stack.packet(&packet);
        stack.outbox().clear();
    }
}

/// Version, lengths and the guest's own address.
fn put_right(packet: &mut [u8]) {
    let length = packet.len() as u16;
    if let Some(header) = packet.get_mut(..20) {
        header[0] = 0x45;
        header[2..4].copy_from_slice(&length.to_be_bytes());
        header[6..8].fill(0);
        header[12..16].copy_from_slice(&[198, 18, 0, 2]);
    }
}

/// A question for a name, a SYN, an echo, and nonsense.
pub fn packet_seeds() -> Vec<Vec<u8>> {
    let packet = |protocol: u8, to: [u8; 4], payload: &[u8]| {
        let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 198, 18, 0, 2];
        bytes.extend(to);
        bytes.extend(payload);
        let length = bytes.len() as u16;
        bytes[2..4].copy_from_slice(&length.to_be_bytes());
        [&length.to_le_bytes()[..], &bytes].concat()
    };
    let question = dns::query(1, "a.test", false).expect("a question");
    let length = (question.len() as u16 + 8).to_be_bytes();
    let udp = [&[0x40, 0, 0, 53][..], &length, &[0, 0], &question].concat();
    let syn = [0x40, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0];
    let seeds = [
        packet(17, [198, 18, 0, 1], &udp),
        packet(6, [192, 0, 2, 1], &syn),
        packet(1, [192, 0, 2, 1], &[8, 0, 0, 0, 0, 1, 0, 1, 7, 7]),
        packet(47, [192, 0, 2, 1], &[0; 8]),
    ];
    vec![seeds.concat(), seeds[0].clone(), [&seeds[1][..], &seeds[1]].concat()]
}

/// One message, taken for a question and for an answer.
pub fn names(bytes: &[u8]) {
    drop(dns::react(bytes, &policy(), &mut Names::default()));
    drop(dns::found(bytes, 1, "a.test", false));
}

/// A question and its answer.
pub fn name_seeds() -> Vec<Vec<u8>> {
    let question = dns::query(1, "a.test", false).expect("a question");
    let answer = match dns::react(&question, &policy(), &mut Names::default()) {
        dns::Reaction::Answer { bytes, .. } => bytes,
        dns::Reaction::Ignore | dns::Reaction::Resolve(_) => Vec::new(),
    };
    vec![question, answer]
}
