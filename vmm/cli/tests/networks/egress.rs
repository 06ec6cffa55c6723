//! Every way out of a cell that we could think of, tried with rules that grant
//! something near it: none leads out, and each is written down.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::common::cell::Cell;
use crate::common::lan::{HOST, Lan, OTHER, PEER, PEER_V6};
use crate::common::servers::{
    Web, greeter, secret, secret_datagrams, two_hosts, two_hosts_over_tls,
};
use crate::common::tls::Authority;
use crate::common::{eventually, finish};

const RULES: [&str; 12] = [
    "peer.test:80",
    "peer.test:443",
    "peer.test:8443",
    "peer.test:9443",
    "rebound.test:7000",
    "metadata.test:80",
    "host.test:7000",
    "translated.test:7000",
    "example.test:7000",
    "peer.test:2222",
    "0.0.0.0/0:7001",
    "[::/0]:7001",
];
const NO_RULE: &str = "no rule covers it";

/// Each way with the target and a part of the reason that are written down.
const WAYS: &[(&str, &str, &str)] = &[
    ("another_address", OTHER, NO_RULE),
    ("the_granted_servers_address", PEER, NO_RULE),
    ("another_port_of_the_granted_name", "peer.test", NO_RULE),
    ("an_address_of_ipv6", PEER_V6, NO_RULE),
    ("an_ipv4_address_in_ipv6", OTHER, NO_RULE),
    ("an_address_as_a_number", OTHER, NO_RULE),
    ("an_address_that_stands_for_no_name", "198.18.9.9", NO_RULE),
    ("a_translators_address", "64:ff9b::c01f:c451", "is translated"),
    ("an_old_tunnels_address", "2002:c01f:c451::1", "is translated"),
    ("a_local_translators_address", "64:ff9b:1::c01f:c451", "is translated"),
    ("a_granted_name_that_leads_to_a_translator", "translated.test", "is translated"),
    ("a_granted_name_that_leads_nowhere", "example.test", "is for documentation"),
    ("a_name_that_was_not_granted", "other.test", NO_RULE),
    ("a_name_below_the_granted_one", "data.peer.test", NO_RULE),
    ("a_name_with_a_final_dot", "other.test", NO_RULE),
    ("a_granted_name_that_leads_to_the_loopback", "rebound.test", "is loopback"),
    ("a_granted_name_that_leads_to_metadata", "metadata.test", "is metadata"),
    ("a_granted_name_that_leads_to_the_host", "host.test", "the host's own"),
    ("metadata", "169.254.169.254", "is metadata"),
    ("metadata_of_ipv6", "fd00:ec2::254", "is metadata"),
    ("a_link_local_address", "169.254.1.1", "is link-local"),
    ("the_hosts_own_address", HOST, "the host's own"),
    ("the_hosts_own_address_of_ipv6", "2620:4f:8000::1", "the host's own"),
    ("the_links_other_end", "198.18.0.1", "nobody listens"),
    ("names_over_a_stream", "198.18.0.1", "nobody listens"),
    ("a_port_of_datagrams_at_the_links_other_end", "198.18.0.1", "nobody listens"),
    ("a_route_of_its_own", OTHER, NO_RULE),
    ("a_source_of_its_own", HOST, "not the address of the cell"),
    ("fragments", "?", "a fragment"),
    ("datagrams_to_another_address", OTHER, NO_RULE),
    ("datagrams_to_the_granted_name", "peer.test", NO_RULE),
    ("datagrams_of_ipv6", PEER_V6, NO_RULE),
    ("datagrams_to_everyone", "255.255.255.255", NO_RULE),
    ("datagrams_to_a_group", "239.1.1.1", NO_RULE),
    ("datagrams_to_another_name_server", OTHER, NO_RULE),
    ("names_that_carry_data", "736563726574.evil.test", NO_RULE),
    ("texts_of_names", "secret.evil.test", NO_RULE),
    // Answered, by the link itself and with nothing.
    ("texts_of_the_granted_name", "peer.test", ""),
    ("a_name_servers_port_for_tls", OTHER, NO_RULE),
    ("names_over_https", OTHER, NO_RULE),
    ("echoes", OTHER, NO_RULE),
    ("echoes_to_the_granted_name", "peer.test", NO_RULE),
    ("echoes_of_ipv6", PEER_V6, NO_RULE),
    ("tunnels_of_ip", OTHER, "protocol 47"),
    ("sctp", OTHER, "protocol 132"),
    ("another_name_in_tls", "peer.test", "TLS asks for the server other.test"),
    ("another_name_in_tls_in_pieces", "peer.test", "TLS asks for the server other.test"),
    ("another_host_in_http", "peer.test", "HTTP asks for the host other.test"),
    ("another_host_in_a_second_request", "peer.test", "HTTP asks for the host other.test"),
    ("two_hosts_in_http", "peer.test", "HTTP asks for no host, or for two"),
    ("no_host_in_http", "peer.test", "HTTP asks for no host, or for two"),
    ("a_long_first_line", "peer.test", "that is too long"),
    ("a_control_character_in_the_target", "peer.test", "the target of a request"),
    ("a_del_in_the_target", "peer.test", "the target of a request"),
    ("an_absolute_target_of_http_0_9", "peer.test", "HTTP asks for the host other.test"),
    ("http_0_9", "peer.test", "a request of HTTP/0.9"),
    ("an_empty_line_first", "peer.test", "neither HTTP/1 nor TLS"),
    ("lines_without_cr", "peer.test", "ends without CR"),
    ("a_folded_field", "peer.test", "a field of HTTP"),
    ("a_space_before_a_colon", "peer.test", "a field of HTTP"),
    ("an_extension_of_a_chunk", "peer.test", "the size of a chunk"),
    ("a_request_in_a_body", "peer.test", "a body of HTTP that begins as a request"),
    ("another_protocol_by_upgrade", "peer.test", "a wish for another protocol"),
    ("a_protocol_of_its_own", "peer.test", "HOST:PORT/raw"),
    ("a_server_that_speaks_first", "peer.test", "the server spoke first"),
    ("no_name_in_tls", "peer.test", "TLS asks for no server"),
    ("an_alert_before_tls", "peer.test", "neither HTTP/1 nor TLS"),
    ("a_change_of_ciphers_before_tls", "peer.test", "neither HTTP/1 nor TLS"),
    ("ssl_2", "peer.test", "neither HTTP/1 nor TLS"),
    ("a_record_of_version_2_0", "peer.test", "a record of TLS"),
    ("a_record_of_version_15_1", "peer.test", "a record of TLS"),
    ("plain_http_where_a_secret_is_for_tls", "peer.test", "over which alone there is a secret"),
    ("an_alert_before_opened_tls", "peer.test", "over which alone there is a secret"),
    ("another_protocol_in_opened_tls", "peer.test", "it is not HTTP/1"),
    ("another_host_in_the_target", "peer.test", "HTTP asks for the host other.test"),
    ("a_tunnel_through_http", "peer.test", "CONNECT"),
    ("two_lengths_in_http", "peer.test", "the length of a request"),
    ("http_2_without_tls", "peer.test", "HTTP/2 without TLS"),
    ("another_name_in_opened_tls", "peer.test", "TLS asks for the server other.test"),
    ("another_host_in_opened_tls", "peer.test", "HTTP asks for the host other.test"),
    ("another_host_in_a_second_request_of_opened_tls", "peer.test", "HTTP asks for the host other"),
    ("a_tunnel_in_opened_tls", "peer.test", "CONNECT"),
    ("http_2_in_opened_tls", "peer.test", "TLS of the cell ended"),
    ("a_host_that_cannot_be_verified", "peer.test", "TLS of the host cannot be trusted"),
];
/// Not by the network at all: the device for streams refuses it.
const ELSEWHERE: &[&str] = &["streams_to_the_host"];

/// Whether a secret lies open for the host, so that it is the rules that keep
/// a cell from it.
fn is_open(peer: &str) -> bool {
    let Ok(mut stream) = TcpStream::connect(peer) else { return false };
    let mut heard = [0; 200];
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let count = stream.read(&mut heard).unwrap_or(0);
    String::from_utf8_lossy(&heard[..count]).contains("SECRET")
}

#[test]
fn no_way_leads_out_and_each_is_written_down() {
    let lan = Lan::new();
    let v6 = |port| format!("[{PEER_V6}]:{port}");
    let streams = [
        format!("{OTHER}:80"),
        format!("{OTHER}:443"),
        format!("{OTHER}:853"),
        format!("{PEER}:443"),
        format!("{PEER}:8080"),
        v6(80),
        "169.254.169.254:80".to_owned(),
        "169.254.169.254:7001".to_owned(),
        "169.254.1.1:7001".to_owned(),
        "[fd00:ec2::254]:7001".to_owned(),
    ];
    let trusted = Authority::new();
    let (asked, told) = lan.at_peer(|| {
        streams.iter().for_each(|address| secret(address));
        two_hosts(&format!("{PEER}:80"));
        two_hosts_over_tls(&format!("{PEER}:8443"), trusted.server(&["peer.test", "other.test"]));
        let unknown = Authority::new().server(&["peer.test"]);
        Web::over_tls(&format!("{PEER}:9443"), "SECRET", unknown);
        greeter(&format!("{PEER}:2222"), "SECRET");
        let told =
            [format!("{OTHER}:5000"), format!("{OTHER}:53"), format!("{PEER}:443"), v6(5000)]
                .map(|address| secret_datagrams(&address));
        (secret_datagrams(&format!("{PEER}:53")), told)
    });
    let own =
        ["127.0.0.1:7000", "192.31.196.1:7000", "192.31.196.1:7001", "[2620:4f:8000::1]:7001"];
    own.iter().for_each(|address| secret(address));
    for peer in streams.iter().map(String::as_str).chain(own) {
        assert!(is_open(peer), "{peer} is not even open for the host");
    }

    let rules = RULES.iter().flat_map(|rule| ["--allow-net", rule]).collect::<Vec<_>>();
    let opened =
        ["--secret", "A=a@https://peer.test:8443", "--secret", "B=b@https://peer.test:9443"];
    let flags = [&rules[..], &opened].concat();
    let cell = Cell::start_as("egress", &flags, &["sleep", "infinity"], |run| {
        run.env("EXOCELL_TLS_ROOTS", trusted.path());
    });
    let script = include_bytes!("../guest/egress/ways.py");
    let ended = finish(&mut cell.exec(&["-i"], &["python3", "-"]), script).ok();
    let tried: Vec<&str> = ended.text().lines().collect();
    assert!(tried.len() >= 40, "{} ways were tried", tried.len());
    for line in &tried {
        let (way, result) = line.split_once(' ').unwrap();
        assert!(result.starts_with("blocked"), "{line}");
        let known = ELSEWHERE.contains(&way) || WAYS.iter().any(|(known, ..)| *known == way);
        assert!(known, "{way} is not in the list");
    }
    assert_eq!(tried.len(), WAYS.len() + ELSEWHERE.len(), "{tried:?}");
    for (way, target, reason) in WAYS {
        eventually(&format!("{way} is written down"), || is_logged(&cell, target, reason));
    }
    // Names that were not granted are no reason to ask anybody.
    assert_eq!(asked.lock().unwrap().len(), 0);
    for told in told {
        assert_eq!(told.lock().unwrap().len(), 0, "a datagram got out");
    }
}

fn is_logged(cell: &Cell, target: &str, reason: &str) -> bool {
    let log = cell.verb(&["logs", "--network"]).ok();
    let entries = log.text().lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    entries.into_iter().any(|entry| {
        entry["target"] == target
            && (reason.is_empty() || entry["decision"] != "allowed")
            && entry["reason"].as_str().unwrap_or_default().contains(reason)
    })
}
