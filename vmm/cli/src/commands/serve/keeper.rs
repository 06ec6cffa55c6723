//! The process with the operator's rights: it starts the others, and reads nothing of theirs but
//! short words whose form is checked.
//!
//! ```text
//! client ──> front (a stage) ── requests, answers ──> worker (a stage), one a tenant or one for all
//!              │ Ask: a worker for ..., the end of ...   ^ code, sealed; channels to dialers
//!              v                                         │
//!            keeper: the store ──> compile (a stage) ────┘
//! ```
//!
//! When it ends, however, all of them end: each hangs on a leash (`exocell_cell::vmm::jail::stage`).
//! It ends when the front does.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime};

use exocell_cell::agent::printable;
use exocell_cell::compile::{Build, Code};
use exocell_cell::exovisor::{Metering, Policy, Use};
use exocell_cell::granted::Links;
use exocell_cell::logging::tracing::warn;
use exocell_cell::relayed;
use exocell_cell::vmm::jail::stage::{Given, Limits as StageLimits, Link, Order, Running, Shown};
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, Layout};
use exocell_service::{
    Ask, Bound, Limits, ListedModule, ListedTenant, Listing, ModuleEntry, ModuleOrder, ModuleStore,
    Pool, Told, WorkerConfig, WorkerRules,
};

use super::outfit::{Outfit, has_network, log_of};
use super::stages::{FRONT, FrontOrder, WORKER, WorkerOrder};
use crate::commands::module;

/// How often it looks whether modules came or went.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// How long clients are kept waiting at the start for modules to be compiled; what takes longer
/// comes later.
const START_TIME: Duration = Duration::from_secs(10);
/// How many modules are compiled at once, each of another tenant.
const COMPILED_AT_ONCE: usize = 8;
/// How long a worker may take to read what it is told.
const ORDER_TIME: Duration = Duration::from_secs(5);
/// What the front may take of memory beside answers that are on their way, in bytes.
const FRONT_BYTES: u64 = 512 << 20;
/// What a worker may take of its own, in bytes: its engine, threads, buffers.
const WORKER_BYTES: u64 = 512 << 20;
/// And for each isolate beside its memory: stacks, tables, its store.
const ISOLATE_BYTES: u64 = 2 << 20;
/// And for each model.
const MODEL_BYTES: u64 = 1 << 30;
/// Threads of a worker: its own, and those that wait for files and models.
const WORKER_THREADS: u64 = 1024;
/// Where a static command has random numbers from: its C library does not tell those who look for
/// getrandom(2) by name that it is there.
const RANDOM: [&str; 2] = ["/dev/random", "/dev/urandom"];
/// What is kept of a worker's last words, in bytes.
const WORDS_BYTES: usize = 512;

struct Keeper {
    layout: Layout,
    store: ModuleStore,
    policy: Policy,
    config: WorkerConfig,
    rules: WorkerRules,
    /// To the front, once there is one.
    front: Mutex<Option<Link>>,
    /// Held while the front is told what is served, so that it hears the last word last.
    publishing: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the store holds, by name.
    wanted: BTreeMap<String, ModuleEntry>,
    /// What of it can be called; the rest is compiled now, or was refused.
    served: BTreeMap<String, Served>,
    turns: Turns,
    last_id: u32,
    workers: HashMap<u64, Started>,
    /// What was said of entries that cannot be read: once.
    damaged: BTreeSet<String>,
}

/// Modules that wait to be compiled. A tenant's are compiled one after the other, so that no number
/// of them, and none that takes long, keeps another tenant's waiting.
#[derive(Default)]
struct Turns {
    /// By tenant. Those who have waited longest come first.
    waiting: VecDeque<(String, VecDeque<ModuleEntry>)>,
    /// Tenants of whom one is compiled.
    busy: BTreeSet<String>,
}

impl Turns {
    fn add(&mut self, entry: ModuleEntry) {
        let known = self.waiting.iter_mut().find(|(tenant, _)| *tenant == entry.tenant);
        match known {
            Some((_, entries)) => entries.push_back(entry),
            None => self.waiting.push_back((entry.tenant.clone(), VecDeque::from([entry]))),
        }
    }

    /// One that is to be compiled now.
    fn next(&mut self) -> Option<ModuleEntry> {
        if self.busy.len() >= COMPILED_AT_ONCE {
            return None;
        }
        let free = |(tenant, _): &(String, _)| !self.busy.contains(tenant);
        let (tenant, mut entries) = self.waiting.remove(self.waiting.iter().position(free)?)?;
        let entry = entries.pop_front();
        self.busy.insert(tenant.clone());
        if !entries.is_empty() {
            self.waiting.push_back((tenant, entries));
        }
        entry
    }

    fn done(&mut self, tenant: &str) {
        self.busy.remove(tenant);
    }

    fn is_empty(&self) -> bool {
        self.busy.is_empty() && self.waiting.is_empty()
    }
}

/// A module that is served.
struct Served {
    entry: ModuleEntry,
    id: u32,
    caps: CapabilitySet,
    code: Arc<Code>,
}

/// A worker that runs.
struct Started {
    place: String,
    outfit: Outfit,
    /// Ids of its modules.
    modules: Vec<u32>,
    orders: mpsc::Sender<Sent>,
    /// Ending it ends the worker.
    control: Arc<Link>,
    /// Its end is wanted, or it is to have no more requests.
    is_outdated: bool,
}

/// What is on its way to a worker.
struct Sent {
    order: WorkerOrder,
    /// Of a module to be loaded.
    module: Option<(Arc<Code>, CapabilitySet)>,
}

/// Serves the modules of `layout` until the front ends; `ready` is called once clients may come. A
/// module that cannot be served is named on standard error and left out.
///
/// # Errors
/// [`CellError`] says why there is no front, or what is wrong with the store.
pub fn serve(
    layout: &Layout,
    pool: Pool,
    rules: WorkerRules,
    calls: &Bound,
    metrics: Option<&Bound>,
    ready: impl FnOnce(),
) -> Result<u8, CellError> {
    let limits = Limits::default();
    let config = WorkerConfig {
        pool: pool.clone(),
        output_bytes: limits.output_bytes,
        is_only: rules.is_shared,
    };
    let keeper = Arc::new(Keeper {
        layout: layout.clone(),
        store: module::store(layout)?,
        policy: Policy::pooled(pool.clone()),
        config,
        rules,
        front: Mutex::default(),
        publishing: Mutex::default(),
        state: Mutex::default(),
    });
    let until = Instant::now() + START_TIME;
    keeper.reload()?;
    while !keeper.state().turns.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    // What is compiled meanwhile is told to the front once it is there.
    let publishing = keeper.publishing();
    let order = FrontOrder {
        limits,
        rules,
        pool,
        calls_are_tcp: calls.is_tcp(),
        metrics_are_tcp: metrics.map(Bound::is_tcp),
        listing: keeper.state().listing(&keeper.store),
    };
    let (front, words) = start_front(&order, calls, metrics)?;
    let link = || front.link().map_err(CellError::host("cannot speak with the front"));
    *keeper.front.lock().unwrap_or_else(PoisonError::into_inner) = Some(link()?);
    drop(publishing);
    let asks = link()?;
    let reloading = Arc::clone(&keeper);
    thread("modules", move || reloading.keep_loaded())?;
    ready();
    while let Ok(Some((ask, _))) = asks.receive() {
        keeper.heed(ask);
    }
    let how = front.stop();
    let words = words.recv().unwrap_or_default();
    Err(CellError::Usage(format!("the process that serves clients {how}{words}")))
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), CellError> {
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10);
    thread.spawn(body).map(drop).map_err(CellError::host(format!("cannot start the thread {name}")))
}

fn start_front(
    order: &FrontOrder,
    calls: &Bound,
    metrics: Option<&Bound>,
) -> Result<(Running, mpsc::Receiver<String>), CellError> {
    let Limits { connections, output_bytes, .. } = order.limits;
    let answers = (connections as u64).saturating_mul(output_bytes as u64 * 8);
    let limits = StageLimits {
        open_files: u64::MAX,
        reserves: true,
        ..StageLimits::of_memory(FRONT_BYTES + answers)
    };
    let given = std::iter::once(calls).chain(metrics).map(Given::file).collect();
    let mut front = Order::new(FRONT.name, given, limits)
        .start(order)
        .map_err(|error| CellError::Usage(error.to_string()))?;
    let (send, words) = mpsc::channel();
    if let Some(said) = front.take_stderr() {
        thread("words", move || drop(send.send(last_words(said))))?;
    }
    Ok((front, words))
}

/// Reads what a stage prints to its end, and gives the last of it.
fn last_words(mut from: impl Read) -> String {
    let (mut last, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = from.read(&mut piece) {
        last.extend_from_slice(piece.get(..count).unwrap_or_default());
        last.drain(..last.len().saturating_sub(WORDS_BYTES));
    }
    let text = String::from_utf8_lossy(&last);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    line.map_or_else(String::new, |line| format!(" ({})", printable(line)))
}

/// What compiling takes.
struct Loader<'a> {
    layout: &'a Layout,
    store: &'a ModuleStore,
    policy: &'a Policy,
}

impl Loader<'_> {
    fn compile(&self, entry: &ModuleEntry) -> Result<(CapabilitySet, Code), CellError> {
        let failed = |error: CellError| CellError::Usage(format!("module {}: {error}", entry.name));
        let caps = CapabilitySet::parse(&entry.caps, Path::new("/"))?;
        let path = self.store.path_of(entry);
        let module = Links::outside(self.layout).module(&path).map_err(failed)?;
        if module.sha256() != entry.sha256 {
            return Err(CellError::Usage(format!(
                "{} is damaged (it is not what was added); exocell module rm {} removes it; add it \
                 again then",
                path.display(),
                entry.name
            )));
        }
        let build = Build {
            policy: self.policy,
            wanted: Use::Functions,
            metering: Metering::of(&caps),
            caps: &caps,
            deadline: None,
        };
        let code = build.compile(self.layout, &module, || ()).map_err(failed)?;
        if has_network(&caps) {
            let directory = log_of(self.layout, &entry.name);
            let what = format!("cannot make {}", directory.display());
            exocell_cell::images::private::folder(&directory).map_err(CellError::host(what))?;
        }
        Ok((caps, code))
    }
}

impl State {
    /// Takes what the store holds now: what is not in it any more goes at once, and what is new
    /// waits to be compiled.
    fn take(&mut self, entries: Vec<ModuleEntry>) {
        let before = std::mem::take(&mut self.wanted);
        for entry in entries {
            if before.get(&entry.name) != Some(&entry) {
                self.turns.add(entry.clone());
            }
            self.wanted.insert(entry.name.clone(), entry);
        }
        let wanted = &self.wanted;
        self.served.retain(|name, served| wanted.get(name) == Some(&served.entry));
    }

    /// The next that is to be compiled and still wanted.
    fn next(&mut self) -> Option<ModuleEntry> {
        loop {
            let entry = self.turns.next()?;
            if self.is_wanted(&entry) {
                return Some(entry);
            }
            self.turns.done(&entry.tenant);
        }
    }

    fn is_wanted(&self, entry: &ModuleEntry) -> bool {
        self.wanted.get(&entry.name) == Some(entry)
    }

    /// A module was compiled; `None` where it cannot be served.
    fn compiled(&mut self, entry: ModuleEntry, made: Option<(CapabilitySet, Code)>) {
        self.turns.done(&entry.tenant);
        // It may have been removed meanwhile.
        let Some((caps, code)) = made.filter(|_| self.is_wanted(&entry)) else { return };
        self.last_id += 1;
        let served = Served { id: self.last_id, caps, code: Arc::new(code), entry };
        self.served.insert(served.entry.name.clone(), served);
    }

    fn listing(&self, store: &ModuleStore) -> Listing {
        let mut listing = Listing::default();
        for Served { entry, id, caps, .. } in self.served.values() {
            let (name, tenant) = (entry.name.clone(), entry.tenant.clone());
            if listing.tenants.iter().all(|known| known.name != tenant) {
                let key_sha256 = match store.key_hash(&tenant) {
                    Ok(key_sha256) => key_sha256,
                    // The others have theirs.
                    Err(error) => {
                        warn!(module = %name, "not served: {error}");
                        continue;
                    }
                };
                listing.tenants.push(ListedTenant { name: tenant.clone(), key_sha256 });
            }
            let deadline = exocell_service::deadline(caps);
            listing.modules.push(ListedModule { name, tenant, id: *id, deadline });
        }
        listing
    }

    /// The modules that a place runs: one tenant's, or all.
    fn of_place(&self, place: &str) -> impl Iterator<Item = &Served> {
        self.served.values().filter(move |one| place.is_empty() || one.entry.tenant == place)
    }

    fn outfit(&self, layout: &Layout, place: &str) -> Outfit {
        let mut outfit = Outfit::default();
        for Served { entry, caps, .. } in self.of_place(place) {
            outfit.add(layout, &entry.name, caps);
        }
        outfit
    }

    /// Has each worker know the modules that its place has now; the numbers of those that cannot,
    /// because they would have to see something else.
    fn tell_workers(&mut self, layout: &Layout) -> Vec<u64> {
        let mut workers = std::mem::take(&mut self.workers);
        let mut outdated = Vec::new();
        for (number, worker) in workers.iter_mut().filter(|(_, worker)| !worker.is_outdated) {
            if !worker.outfit.covers(&self.outfit(layout, &worker.place)) {
                worker.is_outdated = true;
                outdated.push(*number);
                continue;
            }
            self.tell(layout, worker);
        }
        self.workers = workers;
        outdated
    }

    fn tell(&self, layout: &Layout, worker: &mut Started) {
        let wanted: Vec<&Served> = self.of_place(&worker.place).collect();
        let is_wanted = |id: u32| wanted.iter().any(|served| served.id == id);
        for id in worker.modules.iter().copied().filter(|id| !is_wanted(*id)) {
            // One that has ended needs to know nothing.
            let _ = worker.orders.send(Sent { order: WorkerOrder::Forget { id }, module: None });
        }
        for served in wanted.iter().filter(|served| !worker.modules.contains(&served.id)) {
            let _ = worker.orders.send(served.order(layout));
        }
        worker.modules = wanted.iter().map(|served| served.id).collect();
    }
}

impl Served {
    fn order(&self, layout: &Layout) -> Sent {
        let Self { entry, id, caps, code } = self;
        let module =
            ModuleOrder { id: *id, tenant: entry.tenant.clone(), caps: entry.caps.clone() };
        let network = has_network(caps).then(|| log_of(layout, &entry.name));
        let order = WorkerOrder::Load { module, network };
        Sent { order, module: Some((Arc::clone(code), caps.clone())) }
    }
}

impl Keeper {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publishing(&self) -> MutexGuard<'_, ()> {
        self.publishing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell_front(&self, message: &Told, socket: Option<&UnixStream>) {
        let sockets: Vec<_> = socket.into_iter().map(AsFd::as_fd).collect();
        let front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(front) = front.as_ref() {
            // When it is gone, so is this process.
            let _ = front.send(&sockets, message);
        }
    }

    fn keep_loaded(self: &Arc<Self>) {
        let mut known: Option<SystemTime> = None;
        loop {
            std::thread::sleep(RELOAD_INTERVAL);
            let changed = self.store.changed();
            if changed.is_none() || changed != known {
                match self.reload() {
                    Ok(()) => known = changed,
                    Err(error) => warn!("the modules are as they were: {error}"),
                }
            }
            self.tell_workers();
        }
    }

    fn tell_workers(&self) {
        for number in self.state().tell_workers(&self.layout) {
            self.tell_front(&Told::Outdated { number }, None);
        }
    }

    /// Serves what the store holds now. Nothing here takes time: what was removed is not called
    /// any more, whatever is compiled meanwhile.
    fn reload(self: &Arc<Self>) -> Result<(), CellError> {
        let kept = self.store.list().map_err(|error| CellError::Usage(error.to_string()))?;
        let damaged: BTreeSet<_> = kept.damaged.iter().map(ToString::to_string).collect();
        let mut state = self.state();
        for new in damaged.difference(&state.damaged) {
            warn!("not served: {new}");
        }
        state.damaged = damaged;
        state.take(kept.entries);
        drop(state);
        self.publish();
        self.compile_next();
        Ok(())
    }

    fn publish(&self) {
        let publishing = self.publishing();
        let listing = self.state().listing(&self.store);
        self.tell_front(&Told::Listing(listing), None);
        drop(publishing);
    }

    /// Has those compiled whose turn it is.
    fn compile_next(self: &Arc<Self>) {
        loop {
            let Some(entry) = self.state().next() else { return };
            let (keeper, mine) = (Arc::clone(self), entry.clone());
            if let Err(error) = thread("compile", move || keeper.compile(mine)) {
                warn!(module = %entry.name, "not served: {error}");
                self.state().compiled(entry, None);
            }
        }
    }

    fn compile(self: &Arc<Self>, entry: ModuleEntry) {
        let loader = Loader { layout: &self.layout, store: &self.store, policy: &self.policy };
        let made = loader.compile(&entry);
        if let Err(error) = &made {
            warn!("not served: {error}");
        }
        self.state().compiled(entry, made.ok());
        self.publish();
        self.tell_workers();
        self.compile_next();
    }

    fn heed(self: &Arc<Self>, ask: Ask) {
        match ask {
            Ask::End { number } => {
                if let Some(worker) = self.state().workers.get_mut(&number) {
                    worker.is_outdated = true;
                    worker.control.end();
                }
            }
            Ask::Start { place, number } => {
                let keeper = Arc::clone(self);
                let started = thread("worker", move || {
                    if let Err(error) = keeper.start(place, number) {
                        let why = error.to_string();
                        warn!("cannot start a worker: {why}");
                        keeper.tell_front(&Told::Failed { number, why }, None);
                    }
                });
                if let Err(error) = started {
                    self.tell_front(&Told::Failed { number, why: error.to_string() }, None);
                }
            }
        }
    }

    /// Starts a worker, and goes on until it has ended.
    fn start(&self, place: String, number: u64) -> Result<(), CellError> {
        let refused = |why: &str| CellError::Usage(why.to_owned());
        let state = self.state();
        // It asks for places that there are; those that are about to end count a little longer.
        if place.is_empty() != self.rules.is_shared || state.of_place(&place).next().is_none() {
            return Err(refused("there is nothing for it to run"));
        }
        if state.workers.len() >= 2 * self.rules.workers_max + 2 {
            return Err(refused("too many workers have not ended yet"));
        }
        let outfit = state.outfit(&self.layout, &place);
        let limits = self.limits(state.of_place(&place).map(|served| &served.caps));
        drop(state);
        let failed = || CellError::host("cannot connect a worker");
        let (ours, theirs) = UnixStream::pair().map_err(failed())?;
        let mut shown = outfit.shown();
        if crate::is_static() {
            shown.extend(RANDOM.map(Shown::read_only));
        }
        let order = Order {
            shown,
            // What is shown belongs to the operator.
            keeps_id: !outfit.shown().is_empty(),
            ..Order::new(WORKER.name, vec![Given::file(&theirs)], limits)
        };
        let running = order.start(&self.config);
        let mut running = running.map_err(|error| CellError::Usage(error.to_string()))?;
        drop(theirs);
        let control = Arc::new(running.link().map_err(failed())?);
        control.wait_at_most(ORDER_TIME).map_err(failed())?;
        let said = running.take_stderr();
        let (orders, sent) = mpsc::channel();
        let teller = Arc::clone(&control);
        thread("orders", move || pass_on(&sent, &teller))?;
        let is_kept = outfit.has_layers;
        let mut started = Started {
            place: place.clone(),
            outfit,
            modules: Vec::new(),
            orders,
            control: Arc::clone(&control),
            is_outdated: false,
        };
        let mut state = self.state();
        state.tell(&self.layout, &mut started);
        state.workers.insert(number, started);
        drop(state);
        self.tell_front(&Told::Started { number, is_kept }, Some(&ours));
        drop(ours);
        self.attend(running, &control, said, number, &place);
        Ok(())
    }

    /// Waits for the end of a worker. It has nothing to say here.
    fn attend(
        &self,
        running: Running,
        control: &Link,
        said: Option<impl Read + Send>,
        number: u64,
        place: &str,
    ) {
        let (how, words) = std::thread::scope(|scope| {
            let words = said.map(|said| scope.spawn(move || last_words(said)));
            let _ = control.receive::<()>();
            let how = running.stop();
            (how, words.and_then(|words| words.join().ok()).unwrap_or_default())
        });
        let worker = self.state().workers.remove(&number);
        if worker.is_none_or(|worker| !worker.is_outdated) {
            let whose = if place.is_empty() { "all tenants" } else { place };
            warn!("the worker of {whose} {how}{words}");
        }
        self.tell_front(&Told::Ended { number, how }, None);
    }

    /// So much as its modules may have all together, and what an engine takes.
    fn limits<'a>(&self, tables: impl Iterator<Item = &'a CapabilitySet>) -> StageLimits {
        let (mut memory, mut more) = (0, WORKER_BYTES);
        for caps in tables {
            memory = caps.memory_bytes().unwrap_or(0).max(memory);
            let layers = caps.disk_bytes().unwrap_or(0);
            let models = (caps.models().len() as u64).saturating_mul(MODEL_BYTES);
            more = more.saturating_add(layers).saturating_add(models);
        }
        let memory = memory.min(self.config.pool.memory_bytes as u64);
        let isolates = u64::from(self.config.pool.isolates);
        let isolates = isolates.saturating_mul(memory.saturating_add(ISOLATE_BYTES));
        StageLimits {
            file_bytes: u64::MAX,
            open_files: u64::MAX,
            processes: Some(WORKER_THREADS),
            reserves: true,
            ..StageLimits::of_memory(more.saturating_add(isolates))
        }
    }
}

/// Sends a worker its orders; one that does not read them is ended. The dialers of its modules
/// live as long as this.
fn pass_on(sent: &mpsc::Receiver<Sent>, control: &Link) {
    let mut dialers: HashMap<u32, Running> = HashMap::new();
    while let Ok(Sent { order, module }) = sent.recv() {
        let dialer = match (&order, &module) {
            (WorkerOrder::Load { module: ModuleOrder { id, .. }, .. }, Some((_, caps))) => {
                match relayed::start_dialer(caps) {
                    Ok(dialer) => dialer.map(|dialer| (*id, dialer)),
                    Err(error) => {
                        // Without one its connections are refused.
                        warn!("its connections are refused: {error}");
                        None
                    }
                }
            }
            (WorkerOrder::Forget { id }, _) => {
                // It ends when nothing is left of the module's network.
                if let Some(dialer) = dialers.remove(id) {
                    let _ = thread("dialer", move || drop(dialer.wait()));
                }
                None
            }
            _ => None,
        };
        let mut descriptors = Vec::new();
        if let Some((code, _)) = &module {
            descriptors.push(code.file.as_fd());
        }
        if let Some((_, (_, channel))) = &dialer {
            descriptors.push(channel.as_fd());
        }
        if control.send(&descriptors, &order).is_err() {
            return control.end();
        }
        if let Some((id, (running, _))) = dialer {
            dialers.insert(id, running);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_cell::exovisor::{Form, Sealed};

    fn entry(tenant: &str, name: &str) -> ModuleEntry {
        let (name, tenant) = (name.to_owned(), tenant.to_owned());
        let caps = "version = 1\n[memory]\nlimit = \"1M\"".to_owned();
        ModuleEntry { name, tenant, bytes: 0, sha256: String::new(), caps }
    }

    fn made(entry: &ModuleEntry) -> Option<(CapabilitySet, Code)> {
        let caps = CapabilitySet::parse(&entry.caps, Path::new("/")).unwrap();
        let file = Sealed::copy(&b""[..], 1, |_| ()).unwrap();
        Some((caps, Code { file, form: Form::Module }))
    }

    fn served(state: &State) -> Vec<&str> {
        state.served.keys().map(String::as_str).collect()
    }

    #[test]
    fn a_slow_module_keeps_no_other_tenants_from_being_served_or_removed() {
        let mut state = State::default();
        let slow = [entry("mallory", "slow1"), entry("mallory", "slow2")];
        let (old, new) = (entry("alice", "old"), entry("alice", "new"));
        state.take(vec![slow[0].clone(), slow[1].clone(), old.clone()]);
        // Hers is one at a time, and it goes on for ever.
        assert_eq!(state.next(), Some(slow[0].clone()));
        assert_eq!(state.next(), Some(old.clone()));
        assert_eq!(state.next(), None);
        state.compiled(old.clone(), made(&old));
        assert_eq!(served(&state), ["old"]);
        state.take(vec![slow[0].clone(), slow[1].clone(), new.clone()]);
        assert!(served(&state).is_empty(), "what is removed goes at once");
        assert_eq!(state.next(), Some(new.clone()));
        state.compiled(new.clone(), made(&new));
        assert_eq!(served(&state), ["new"]);
        assert_eq!(state.next(), None);
        // One that was removed while it was compiled is not served, nor is what is refused.
        state.take(vec![slow[1].clone(), new.clone()]);
        state.compiled(slow[0].clone(), made(&slow[0]));
        assert_eq!(state.next(), Some(slow[1].clone()));
        state.compiled(slow[1].clone(), None);
        assert_eq!(served(&state), ["new"]);
        // It is not tried again before it is another one.
        state.take(vec![slow[1].clone(), new]);
        assert_eq!(state.next(), None);
        assert!(state.turns.is_empty());
    }

    #[test]
    fn so_many_are_compiled_at_once_and_no_tenant_waits_for_two_of_another() {
        let mut turns = Turns::default();
        let tenants: Vec<String> = (0..=COMPILED_AT_ONCE).map(|n| n.to_string()).collect();
        for tenant in &tenants {
            turns.add(entry(tenant, "first"));
            turns.add(entry(tenant, "second"));
        }
        let begun: Vec<_> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(begun.len(), COMPILED_AT_ONCE);
        turns.done("0");
        let next = turns.next().unwrap();
        assert_eq!((next.tenant, next.name), (COMPILED_AT_ONCE.to_string(), "first".to_owned()));
    }
}
