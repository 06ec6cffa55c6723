//! Ports of a sandbox on the host's loopback: whoever connects is led in by the operator's own
//! way. The sandbox needs no right to the network for that.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::agent::client;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

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
    let led = move |stream| {
        let sandbox = weak.upgrade()?;
        // A connection that comes to nothing is closed, as by a host without a listener.
        Some(async move { drop(lead(&sandbox, stream, port).await) })
    };
    sandbox.ports.add(port, at, || tokio::spawn(accept(listener, led)))
}

/// Leads clients in, until there is no sandbox any more. All of them go when this is dropped.
async fn accept<F>(listener: TcpListener, lead: impl Fn(TcpStream) -> Option<F>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut all = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while all.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let Some(led) = lead(stream) else { return };
                all.spawn(async move {
                    led.await;
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn who_is_led_in_goes_with_the_port() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let held = Arc::new(());
        let own = held.clone();
        let stays = move |stream: TcpStream| {
            let own = own.clone();
            Some(async move {
                std::future::pending::<()>().await;
                drop((stream, own));
            })
        };
        let port = tokio::spawn(accept(listener, stays));
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(at).await.unwrap());
        }
        while Arc::strong_count(&held) < 5 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        port.abort();
        for client in &mut clients {
            assert!(matches!(client.read(&mut [0]).await, Ok(0) | Err(_)));
        }
        assert!(port.await.unwrap_err().is_cancelled());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
