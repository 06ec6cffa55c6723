//! Names, turned into addresses by the isolate's [`Network`](crate::Network).

use super::network::ours;
use super::wasi::Wasi;
use crate::hostcalls::sockets::NetworkError;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::bindings::sockets::ip_name_lookup::{
    Host, HostResolveAddressStream, ResolveAddressStream,
};
use wasmtime_wasi::p2::bindings::sockets::network::{ErrorCode, IpAddress, Network};
use wasmtime_wasi::p2::{DynPollable, Pollable, SocketResult, subscribe};

type Answer = std::result::Result<VecDeque<IpAddr>, NetworkError>;

/// An answer that is there or will come.
#[derive(Default)]
struct Question {
    answer: Mutex<Option<Answer>>,
    changed: Notify,
}

impl Question {
    fn settle(&self, answer: Answer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.changed.notify_waiters();
    }

    fn is_settled(&self) -> bool {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn next(&self) -> SocketResult<Option<IpAddress>> {
        match &mut *self.answer.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Err(ErrorCode::WouldBlock.into()),
            Some(Ok(addresses)) => Ok(addresses.pop_front().map(IpAddress::from)),
            Some(Err(NetworkError::Denied)) => Err(ErrorCode::AccessDenied.into()),
            Some(Err(NetworkError::Busy)) => Err(ErrorCode::TemporaryResolverFailure.into()),
            Some(Err(_)) => Err(ErrorCode::NameUnresolvable.into()),
        }
    }
}

/// What a handle of a stream of addresses stands for.
struct Names(Arc<Question>);

#[async_trait]
impl Pollable for Names {
    async fn ready(&mut self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.is_settled() {
                return;
            }
            changed.await;
        }
    }
}

impl Host for Wasi {
    fn resolve_addresses(
        &mut self,
        _: Resource<Network>,
        name: String,
    ) -> SocketResult<Resource<ResolveAddressStream>> {
        let network = self.network()?;
        let question = Arc::new(Question::default());
        match name.parse::<IpAddr>() {
            Ok(address) => question.settle(Ok([address].into())),
            Err(_) => {
                let question = Arc::clone(&question);
                let done = move |found: std::result::Result<Vec<IpAddr>, NetworkError>| {
                    question.settle(found.map(VecDeque::from));
                };
                network.look_up(&name, Box::new(done));
            }
        }
        let handle = self.table.push(Names(question))?;
        Ok(Resource::new_own(handle.rep()))
    }
}

impl HostResolveAddressStream for Wasi {
    fn resolve_next_address(
        &mut self,
        stream: Resource<ResolveAddressStream>,
    ) -> SocketResult<Option<IpAddress>> {
        self.peers()?;
        self.table.get(&ours::<_, Names>(&stream))?.0.next()
    }

    fn subscribe(
        &mut self,
        stream: Resource<ResolveAddressStream>,
    ) -> Result<Resource<DynPollable>> {
        subscribe(&mut self.table, ours::<_, Names>(&stream))
    }

    fn drop(&mut self, stream: Resource<ResolveAddressStream>) -> Result<()> {
        self.table.delete(Resource::<Names>::new_own(stream.rep()))?;
        Ok(())
    }
}
