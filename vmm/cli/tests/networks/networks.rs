//! Networks between cells: who is in one reaches the others by name, and nobody else does.

use crate::common::cell::Cell;
use crate::common::host::{children, command_line, kill};
use crate::common::{Finished, IMAGE, eventually, run, shell, unique};

/// A network, removed when dropped.
struct Network(String);

impl Network {
    #[track_caller]
    fn new(flags: &[&str]) -> Self {
        let network = Self(unique("net"));
        run([&["network", "create"], flags, &[&network.0]].concat()).ok();
        network
    }

    #[track_caller]
    fn remove(&self) -> Finished {
        run(["network", "rm", &self.0])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // A test may have removed it.
        run(["network", "rm", "-f", &self.0]);
    }
}

/// A cell that answers with its host name on port 80.
fn server(word: &str, flags: &[&str]) -> Cell {
    let serve = ["python3", "-m", "http.server", "80", "--directory", "/etc"];
    let cell = Cell::start(word, flags, &serve);
    let asks = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 80), 1)'";
    eventually("the server listens", || cell.shell(asks).code == 0);
    cell
}

/// What a server says at `host`, or the error's name.
fn fetch(from: &Cell, host: &str) -> String {
    let program = format!(
        "import urllib.request as u, urllib.error as e
try: print(u.urlopen('http://{host}/hostname', timeout=5).read().decode().strip())
except e.URLError as error: print(error.reason)
except OSError as error: print(error)"
    );
    from.shell(&format!("python3 -c \"{program}\"")).ok().text().to_owned()
}

/// The cell's addresses in networks, in their order.
fn addresses(cell: &Cell) -> Vec<String> {
    let shown =
        cell.shell("ip -4 -o addr show dev eth0 | sed -n 's/.*inet \\([0-9.]*\\).*eth0:.*/\\1/p'");
    shown.ok().text().lines().map(str::to_owned).collect()
}

/// The process of a network's switch.
fn switch(network: &Network) -> Option<i32> {
    let all = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut pids = pids.filter(|pid| command_line(*pid).contains("switch-network"));
    pids.find(|pid| command_line(*pid).contains(&network.0))
}

#[test]
fn cells_of_a_network_reach_each_other_by_their_names_and_nobody_else_does() {
    let (network, other) = (Network::new(&[]), Network::new(&[]));
    let named = ["--network", &network.0, "--network-alias", "Database", "--hostname", "here"];
    let db = server("db", &named);
    let web = Cell::idle("web", &["--network", &network.0]);
    let id = db.inspect()["id"].as_str().expect("an id").to_owned();
    let with_network = format!("{}.{}", db.name, network.0);
    for name in [&db.name, "database", &id[..12], &with_network] {
        assert_eq!(fetch(&web, name), "here", "{name}");
    }
    let own = addresses(&db);
    assert_eq!(fetch(&web, &own[0]), "here");
    assert_eq!(db.shell("getent hosts here").ok().text().split(' ').next(), Some(own[0].as_str()));
    // The other way too, and by datagrams.
    let listens = "import socket; s = socket.socket(2, 2); s.bind(('', 9)); print(s.recvfrom(9))";
    let mut hears = crate::common::Started::new(&mut web.exec(&[], &["python3", "-c", listens]));
    let says = format!("import socket; socket.socket(2, 2).sendto(b'word', ('{}', 9))", web.name);
    eventually("a datagram comes", || {
        db.exec(&[], &["python3", "-c", &says]).status().expect("exec");
        hears.child.try_wait().expect("wait").is_some()
    });
    let heard = hears.finish(crate::common::LIMIT).expect("it ends").ok();
    assert!(heard.text().contains("b'word'") && heard.text().contains(&own[0]), "{}", heard.text());

    let stranger = Cell::idle("stranger", &["--network", &other.0, "--privileged"]);
    let alone = Cell::idle("alone", &["--allow-net", "nobody.test:80"]);
    for cell in [&stranger, &alone] {
        assert!(fetch(cell, &db.name).contains("Name or service not known"));
        assert!(fetch(cell, &own[0]).contains("No route to host"), "{}", fetch(cell, &own[0]));
    }
    // Nor by an address of that network which its root takes.
    let taken = own[0].rsplit_once('.').expect("an address").0.to_owned() + ".77";
    stranger.shell(&format!("ip addr add {taken}/16 dev eth0")).ok();
    assert_ne!(fetch(&stranger, &own[0]), "here");
}

#[test]
fn no_cell_speaks_for_another_or_for_a_network_that_it_is_not_in() {
    let (network, other) = (Network::new(&[]), Network::new(&[]));
    let db = Cell::idle("db", &["--network", &network.0]);
    let liar = Cell::idle("liar", &["--network", &network.0, "--privileged"]);
    let beyond = Cell::idle("beyond", &["--network", &other.0]);
    let (own, far) = (addresses(&db)[0].clone(), addresses(&beyond)[0].clone());
    let listens = "import socket
s = socket.socket(2, 2); s.bind(('', 9)); s.settimeout(4); got = []
try:
    while True: got.append(s.recvfrom(99))
except TimeoutError: print(got)";
    let hears =
        |cell: &Cell| crate::common::Started::new(&mut cell.exec(&[], &["python3", "-c", listens]));
    let (near, away) = (hears(&db), hears(&beyond));
    // A raw socket with a header of its own: another member's address, the gateway's, anybody's.
    let gateway = own.rsplit_once('.').expect("an address").0.to_owned() + ".1";
    let forges = format!(
        "import socket, struct, time
s = socket.socket(2, 3, 255)
def send(source, to, text):
    udp = struct.pack('!HHHH', 9, 9, 8 + len(text), 0) + text
    ip = struct.pack('!BBHHHBBH4s4s', 69, 0, 20 + len(udp), 1, 0, 64, 17, 0,
        socket.inet_aton(source), socket.inet_aton(to))
    s.sendto(ip + udp, (to, 0))
time.sleep(1)
for source in ['{own}', '{gateway}', '8.8.8.8', '198.18.0.1']:
    send(source, '{own}', b'forged')
    send(source, '{far}', b'forged')
own = socket.gethostbyname(socket.gethostname())
send(own, '{far}', b'forged')
send(own, '{own}', b'honest')"
    );
    liar.exec(&[], &["python3", "-c", &forges]).status().expect("exec");
    let told = near.finish(crate::common::LIMIT).expect("it ends").ok();
    assert!(told.text().contains("honest") && !told.text().contains("forged"), "{}", told.text());
    assert_eq!(away.finish(crate::common::LIMIT).expect("it ends").ok().text(), "[]");
}

#[test]
fn a_network_is_joined_and_left_while_a_cell_runs() {
    let (first, second) = (Network::new(&[]), Network::new(&[]));
    let db = server("db", &["--network", &second.0]);
    let web = Cell::idle("web", &["--network", &first.0]);
    assert!(fetch(&web, &db.name).contains("Name or service not known"));
    let joins = ["network", "connect", "--alias", "app", &second.0, &web.name];
    run(joins).ok();
    run(joins).exited(125).complains_of(&["already exists in network", &second.0]);
    assert_eq!(addresses(&web).len(), 2);
    assert!(!fetch(&web, &db.name).contains("not known"));
    assert_eq!(
        db.shell("getent hosts app").ok().text().split(' ').next(),
        Some(addresses(&web)[1].as_str())
    );
    second.remove().exited(125).complains_of(&["has active endpoints", "2 cells"]);
    // It is in both again when it starts again.
    web.verb(&["restart", "-t", "0"]).ok();
    assert_eq!(addresses(&web).len(), 2);
    run(["network", "disconnect", &second.0, &web.name]).ok();
    assert_eq!(addresses(&web).len(), 1);
    assert!(fetch(&web, &db.name).contains("Name or service not known"));
    run(["network", "disconnect", &second.0, &web.name]).exited(125).complains_of(&["is not in"]);
    let listed = run(["network", "inspect", &second.0]).ok().one();
    assert_eq!(listed["cells"].as_array().map(Vec::len), Some(1), "{listed}");
    run(["rm", "-f", &db.name]).ok();
    second.remove().ok();
    run(["network", "inspect", &second.0]).exited(125).complains_of(&["not found"]);
}

#[test]
fn a_switch_that_was_killed_is_replaced_and_its_cells_are_in_again() {
    let network = Network::new(&[]);
    let db = server("db", &["--network", &network.0]);
    let web = Cell::idle("web", &["--network", &network.0]);
    let own = addresses(&db);
    let process = switch(&network).expect("a switch");
    let jailed = children(process);
    kill(process);
    eventually("the switch is gone", || jailed.iter().all(|pid| command_line(*pid).is_empty()));
    assert!(fetch(&web, &own[0]).contains("No route to host"));
    let third = Cell::idle("third", &["--network", &network.0]);
    eventually("all are in it again", || fetch(&web, &db.name).len() == 12);
    assert_eq!(addresses(&db), own, "at the same address");
    assert!(!addresses(&third).is_empty() && addresses(&third) != own);
    for cell in [&db, &web, &third] {
        run(["rm", "-f", &cell.name]).ok();
    }
    eventually("nobody is left, so the switch ends", || switch(&network).is_none());
}

#[test]
fn addresses_are_given_as_they_are_asked_for_and_a_table_is_asked_too() {
    let network = Network::new(&["--subnet", "10.77.7.0/24", "--label", "a=b"]);
    let db = Cell::idle("db", &["--network", &network.0, "--ip", "10.77.7.9"]);
    assert_eq!(addresses(&db), ["10.77.7.9"]);
    let taken = format!("name={},ip=10.77.7.9", network.0);
    let start = |network: &str| shell(&["--network", network], "true");
    start(&taken).exited(125).complains_of(&["10.77.7.9 is another cell's"]);
    start(&format!("name={},ip=10.78.0.1", network.0)).exited(125).complains_of(&["10.77.7.0/24"]);
    start("nowhere").exited(125).complains_of(&["network nowhere not found"]);
    start("host").exited(125).complains_of(&["--network host is not there"]);
    run(["network", "create", "--subnet", "10.77.0.0/16", &unique("net")])
        .exited(125)
        .complains_of(&["overlaps", &network.0]);
    run(["network", "create", &network.0]).exited(125).complains_of(&["already exists"]);
    let filter = format!("name={}", network.0);
    let listed = run(["network", "ls", "--filter", &filter, "--filter", "label=a=b", "--json"]);
    assert_eq!(listed.ok().json()["subnet"], "10.77.7.0/24");

    let table = tempfile::NamedTempFile::new().expect("a file");
    let text = "version = 1\n[memory]\nlimit = \"256M\"\n[cpu]\n[processes]\nmax = 64\n[stdio]\n[network]\njoin = [\"other\"]\n";
    std::fs::write(table.path(), text).expect("a table");
    let path = table.path().to_str().expect("a path");
    shell(&["--caps", path, "--network", &network.0], "true").exited(125).complains_of(&[
        "--network asks for join",
        &network.0,
        "network",
    ]);
    let module = ["run", "--rm", "--network", &network.0, "--strength", "isolate", IMAGE];
    run(module).exited(125).complains_of(&["for vm cells"]);
}

#[test]
fn an_internal_network_leads_nowhere_else() {
    let network = Network::new(&["--internal"]);
    let lan = crate::common::lan::Lan::new();
    let peer = crate::common::lan::PEER;
    let web = lan.at_peer(|| crate::common::servers::Web::new(&format!("{peer}:80"), "hello"));
    let cell = Cell::idle("in", &["--network", &network.0, "--allow-net", "peer.test:80"]);
    assert!(fetch(&cell, "peer.test").contains("Name or service not known"));
    let open = Network::new(&[]);
    let cell = Cell::idle("out", &["--network", &open.0, "--allow-net", "peer.test:80"]);
    assert!(!fetch(&cell, "peer.test").contains("not known"));
    assert_eq!(web.asked().len(), 1);
}

#[test]
fn a_network_that_is_made_again_has_nothing_of_the_one_before() {
    let network = Network::new(&[]);
    let first = Cell::idle("first", &["--network", &network.0]);
    run(["rm", "-f", &first.name]).ok();
    // Its switch waits for other cells still.
    let before = switch(&network);
    network.remove().ok();
    run(["network", "create", &network.0]).ok();
    let db = server("db", &["--network", &network.0]);
    eventually("the switch before has ended", || switch(&network) != before);
    let web = Cell::idle("web", &["--network", &network.0]);
    assert_eq!(fetch(&web, &db.name).len(), 12, "its host name");
}
