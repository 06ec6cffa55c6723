//! TCP between a program and the host: bytes in both directions, connections,
//! and requests that wait for their answers.
//!
//! The server is an ordinary process of the host. Natively its clients come over
//! the loopback, from gVisor through its netstack and a veth(4) pair, from cells
//! through their link and the dialer.

mod lan;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::NetworkArgs;
use crate::program::{Compiler, Program};
use crate::row::Row;
use crate::subject::{self, Peer};
use crate::turns::{Run, Setting, choose, listed};
pub use lan::Lan;

/// The sources in `benches/network`.
const PROGRAM: Program = Program {
    name: "network",
    compiler: Compiler::Gcc,
    sources: &[
        ("network.h", include_str!("../../network/network.h")),
        ("network.c", include_str!("../../network/network.c")),
        ("peer.c", include_str!("../../network/peer.c")),
    ],
};
const MEMORY: &str = "512m";
/// Who has a network; the other peers are without one.
const PEERS: [Peer; 2] = [Peer::Native, Peer::Gvisor];

/// Measures what `args` ask for; rows in the order of the program's list.
pub fn measure(args: &NetworkArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let mut list = Command::new(folder.join(PROGRAM.name));
    list.arg("list");
    let wanted = choose(listed(list)?, &args.only)?;
    let subjects = subject::subjects(&peers(&args.options.peers), &args.options.kernel, exocell);
    let lan = Lan::new()?;
    let server = Server::start(&folder)?;
    let program = folder.join(PROGRAM.name).display().to_string();
    let arguments = ["serve", lan::HOST, &server.port];
    lan.prepare(&[&[program.as_str()], &arguments[..]].concat())?;
    let rule = format!("{}:{}", lan::HOST, server.port);
    let setting = Setting {
        cpus: args.cpus,
        realtime: false,
        memory: MEMORY,
        samples: 1,
        program: PROGRAM.name,
        folder: &folder,
        root: None,
        arguments: &arguments,
        cell: &["--allow-net", &rule],
        lan: Some(&lan),
        exocell,
    };
    let mut run = Run::new(&subjects, wanted, setting);
    for round in 0..args.options.rounds as usize {
        run.round(round);
    }
    Ok(run.rows())
}

/// Those of `asked` that have a network; all of these where nobody was named.
fn peers(asked: &[Peer]) -> Vec<Peer> {
    if asked.is_empty() {
        return PEERS.to_vec();
    }
    let (with, without): (Vec<Peer>, Vec<Peer>) =
        asked.iter().partition(|peer| PEERS.contains(peer) || **peer == Peer::None);
    for peer in without {
        eprintln!("{peer:?} is left out: it has no network");
    }
    if with.is_empty() { vec![Peer::None] } else { with }
}

/// The host's end; ends with its owner, or with its standard input.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start(folder: &Path) -> Result<Self, BenchError> {
        let program = folder.join(PROGRAM.name);
        let mut command = Command::new(&program);
        command.args(["peer", lan::HOST]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(BenchError::host(program.display()))?;
        let mut port = String::new();
        let output = child.stdout.take().map(BufReader::new);
        let read = output.map_or(Ok(0), |mut output| output.read_line(&mut port));
        let server = Self { child, port: port.trim().to_owned() };
        match read {
            Ok(_) if server.port.parse::<u16>().is_ok() => Ok(server),
            _ => Err(BenchError::Subject {
                subject: "the host's end".into(),
                why: format!("it listens on no port of {}", lan::HOST),
            }),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails only if it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_without_a_network_are_left_out() {
        assert_eq!(peers(&[]), PEERS);
        assert_eq!(peers(&[Peer::Bwrap, Peer::Gvisor]), [Peer::Gvisor]);
        assert_eq!(peers(&[Peer::StockUml]), [Peer::None]);
    }
}
