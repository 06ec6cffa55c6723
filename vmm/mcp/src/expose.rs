//! Ports of a sandbox on the host's loopback: whoever connects is led in by the operator's own
//! way. The sandbox needs no right to the network for that.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use exocell_cell::agent::client;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;

use crate::error::Refusal;
use crate::sandbox::Sandbox;

/// Connections to each port.
const CONNECTIONS_MAX: usize = 64;

/// Opens a port; one that is open stays where it is.
///
/// # Errors
/// It is no port, too many are open, or the host has none left.
pub async fn expose(sandbox: &Arc<Sandbox>, port: u16) -> Result<SocketAddr, Refusal> {
    if port == 0 {
        return Err(Refusal::new("port: 0 is none"));
    }
    let failed = |error| Refusal::new(format!("no port of the host: {error}"));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?;
    let weak = Arc::downgrade(sandbox);
    sandbox.ports.add(port, at, || tokio::spawn(accept(weak, listener, port)))
}

async fn accept(sandbox: Weak<Sandbox>, listener: TcpListener, port: u16) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let Some(sandbox) = sandbox.upgrade() else { return };
                tokio::spawn(async move {
                    // A connection that comes to nothing is closed, as by a host without a listener.
                    let _ = lead(&sandbox, stream, port).await;
                    drop(place);
                });
            }
            // Out of descriptors: some will be free again.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn lead(sandbox: &Arc<Sandbox>, mut from: TcpStream, port: u16) -> Result<(), Refusal> {
    let failed = |error: std::io::Error| Refusal::new(format!("no way into the sandbox: {error}"));
    let line = sandbox.ask(move |guest, _| {
        client::dial(&guest, &guest, port)?;
        guest.into_endless().map_err(failed)
    });
    let line = line.await?;
    line.set_nonblocking(true).map_err(failed)?;
    let mut line = UnixStream::from_std(line).map_err(failed)?;
    let _ = from.set_nodelay(true);
    copy_bidirectional(&mut from, &mut line).await.map(drop).map_err(failed)
}
