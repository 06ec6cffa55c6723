//! Clients that behave, and clients that do not.

use exocell_exovisor::{Pool, Slots};
use exocell_service::{Front, Limits, Listener, ModuleStore, Service, StoreError};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;

/// The deadline of what does not end.
const SOON: &str = "[time]\ndeadline = \"200ms\"";
const MODULE: &str = r#"(module (memory 1 100)
  (func (export "add") (param i32 i64) (result i64) (i64.add (i64.extend_i32_s (local.get 0)) (local.get 1)))
  (func (export "half") (param f64) (result f64) (f64.div (local.get 0) (f64.const 2)))
  (func (export "trap") unreachable)
  (func (export "spin") (loop $again (br $again)))
  (func (export "bomb") (loop $more (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) unreachable))"#;

fn caps(text: &str) -> CapabilitySet {
    let text = format!("version = 1\n[memory]\nlimit = \"1M\"\n{text}");
    CapabilitySet::parse(&text, Path::new("/")).expect("the test's grant is right")
}

/// A command that writes its first argument and then, again and again until it is its end, what it
/// reads; `n` as a second argument makes it write that to its standard error and end with 3, `t`
/// trap, `o` write for ever.
const COMMAND: &str = r#"(module
  (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $sizes (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 2)
  (func $length (param $at i32) (result i32) (local $end i32)
    (local.set $end (local.get $at))
    (loop $more
      (if (i32.load8_u (local.get $end))
        (then (local.set $end (i32.add (local.get $end) (i32.const 1))) (br $more))))
    (i32.sub (local.get $end) (local.get $at)))
  (func $say (param $fd i32) (param $at i32) (param $length i32) (result i32)
    (i32.store (i32.const 0) (local.get $at))
    (i32.store (i32.const 4) (local.get $length))
    (call $write (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 8)))
  (func (export "_start") (local $how i32)
    (drop (call $sizes (i32.const 16) (i32.const 20)))
    (drop (call $args (i32.const 64) (i32.const 256)))
    (if (i32.gt_u (i32.load (i32.const 16)) (i32.const 1)) (then
      (drop (call $say (i32.const 1) (i32.load (i32.const 68))
        (call $length (i32.load (i32.const 68)))))))
    (if (i32.gt_u (i32.load (i32.const 16)) (i32.const 2)) (then
      (local.set $how (i32.load8_u (i32.load (i32.const 72))))))
    (if (i32.eq (local.get $how) (i32.const 0x6e)) (then
      (drop (call $say (i32.const 2) (i32.load (i32.const 72))
        (call $length (i32.load (i32.const 72)))))
      (call $exit (i32.const 3))))
    (if (i32.eq (local.get $how) (i32.const 0x74)) (then unreachable))
    (if (i32.eq (local.get $how) (i32.const 0x6f)) (then
      (loop $again
        (br_if $again (i32.eqz (call $say (i32.const 1) (i32.const 4096) (i32.const 1000)))))
      (call $exit (i32.const 0))))
    (loop $again
      (i32.store (i32.const 0) (i32.const 65536))
      (i32.store (i32.const 4) (i32.const 100))
      (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
      (if (i32.load (i32.const 8)) (then
        (drop (call $say (i32.const 1) (i32.const 65536) (i32.load (i32.const 8))))
        (br $again))))))"#;
/// What a command may write.
const OUTPUT_BYTES: usize = 20_000;

struct World {
    _runtime: Runtime,
    dir: tempfile::TempDir,
    service: Arc<Service>,
    store: ModuleStore,
    address: SocketAddr,
    operator: SocketAddr,
    keys: [String; 2],
}

impl World {
    fn new() -> Self {
        Self::with(Duration::from_secs(60), Slots::Guarded)
    }

    /// Tenant `a` has the modules `math` and `loops`, `b` the module `other`.
    fn with(client_time: Duration, slots: Slots) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = ModuleStore::open(dir.path()).unwrap();
        let keys = [("math", "a"), ("other", "b")].map(|(name, tenant)| {
            let added = store.add(name, tenant, MODULE.as_bytes(), &caps("")).unwrap();
            added.key.expect("the tenant is new")
        });
        store.add("loops", "a", MODULE.as_bytes(), &caps(SOON)).unwrap();
        store.add("echo", "a", COMMAND.as_bytes(), &caps("[stdio]")).unwrap();
        let limits = Limits {
            head_bytes: 2000,
            body_bytes: 1000,
            output_bytes: OUTPUT_BYTES,
            client_time,
            connections: 20,
        };
        let pool = Pool { isolates: 50, stacks: 50, slots, ..Pool::default() };
        let service =
            Arc::new(Service::new(&store, pool, limits, Box::new(|_, _| Ok(None))).unwrap());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let [address, operator] = [Front::Calls, Front::Metrics].map(|front| {
            let bound = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
            let (service, listener) = (Arc::clone(&service), bound.unwrap());
            let address = listener.local_addr().unwrap();
            runtime.spawn(async move { service.serve(Listener::Tcp(listener), front).await });
            address
        });
        Self { _runtime: runtime, dir, service, store, address, operator, keys }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// Sends all of it and answers with what comes until the end.
    fn send(&self, text: &str) -> String {
        let mut stream = self.connect();
        // A server that refuses early may close before it has read all.
        let _ = stream.write_all(text.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn post(&self, path: &str, key: &str, body: &str) -> String {
        let length = body.len();
        self.send(&format!(
            "POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        ))
    }

    fn call(&self, function: &str, body: &str) -> String {
        self.post(&format!("/v1/call/math/{function}"), &self.keys[0], body)
    }

    /// Runs `echo` with these arguments.
    fn echo(&self, query: &str, body: &str) -> String {
        self.post(&format!("/v1/run/echo{query}"), &self.keys[0], body)
    }

    fn spin(&self) -> String {
        self.post("/v1/call/loops/spin", &self.keys[0], "[]")
    }

    fn get(&self, path: &str, key: &str) -> String {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        ))
    }

    fn is_well(&self) {
        let answer = self.call("add", "[2, 40]");
        assert!(answer.contains("\"results\":[42]"), "{answer}");
    }
}

fn has(answer: &str, status: u16, words: &str) {
    let right = answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(words);
    assert!(right, "not {status} with {words}: {answer}");
}

#[test]
fn functions_are_called_with_numbers() {
    let world = World::new();
    has(&world.call("add", "[-2, 9007199254740993]"), 200, "\"results\":[9007199254740991]");
    has(&world.call("half", "[3]"), 200, "\"results\":[1.5]");
    has(&world.call("trap", "[]"), 200, "\"trap\":");
    has(&world.spin(), 200, "\"ended\":\"deadline\"");
    has(&world.call("bomb", "[]"), 200, "\"out_of_memory\":\"1M\"");
    has(&world.call("nothing", "[]"), 404, "exports no function");
    for body in ["[1]", "[1, 2, 3]", "[1.5, 2]", "[3000000000, 2]", "{}", "[\"1\", 2]", "", "[1, 2"]
    {
        has(&world.call("add", body), 400, "error");
    }
}

#[test]
fn a_command_reads_the_body_and_its_output_is_the_answer() {
    let world = World::new();
    let input = "line\n".repeat(100);
    for (query, body, output) in [
        ("", "", ""),
        ("", "some text", "some text"),
        ("?arg=one%20a+b:", &input[..], &*format!("one a b:{input}")),
        ("?arg=%C3%A4&arg=x", "", "\u{e4}"),
    ] {
        let answer = world.echo(query, body);
        has(&answer, 200, "Content-Type: application/octet-stream\r\n");
        assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, output, "{query}");
    }
    world.is_well();
}

#[test]
fn a_command_that_fails_is_told_of() {
    let world = World::new();
    let failed = world.echo("?arg=out&arg=no", "");
    has(&failed, 500, r#""outcome":{"exited":3},"stderr":"no","stdout":"out"}"#);
    has(&world.echo("?arg=out&arg=t", ""), 500, "unreachable");
    // It ends well, though its last write did not succeed.
    has(&world.echo("?arg=out&arg=o", ""), 500, "the command wrote more than 20000");
    let answer = world.send(&format!(
        "POST /v1/run/echo?arg=x HTTP/1.1\r\nAuthorization: Bearer {}\r\nAccept: application/json\r\n\
         Connection: close\r\n\r\n",
        world.keys[0]
    ));
    has(&answer, 200, r#""outcome":{"exited":0},"stderr":"","stdout":"x"}"#);
    // None of these is the service's refusal.
    has(&world.get("/v1/stats", &world.keys[0]), 200, r#""denials":0"#);
}

#[test]
fn a_command_is_run_with_arguments_of_its_tenant_only() {
    let world = World::new();
    for (query, words) in [
        ("?x=1", "arguments only"),
        ("?arg", "arguments only"),
        ("?arg=%ff", "no UTF-8"),
        ("?arg=a%00b", "zero byte"),
    ] {
        has(&world.echo(query, ""), 400, words);
    }
    has(&world.post("/v1/run/echo", &world.keys[1], ""), 401, "key");
    has(&world.post("/v1/run/nothing", &world.keys[0], ""), 401, "key");
    has(&world.post("/v1/run/math", &world.keys[0], ""), 404, "no command");
    has(&world.get("/v1/run/echo", &world.keys[0]), 405, "method");
}

#[test]
fn one_connection_carries_many_requests() {
    let world = World::new();
    let mut stream = world.connect();
    let request = format!(
        "POST /v1/call/math/half HTTP/1.1\r\nAuthorization: Bearer {}\r\nContent-Length: 3\r\n\r\n[8]",
        world.keys[0]
    );
    // Two at once, the second in pieces.
    let both = request.repeat(2);
    let (first, second) = both.as_bytes().split_at(request.len() + 30);
    stream.write_all(first).unwrap();
    stream.write_all(second).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    assert_eq!(answers.matches("\"results\":[4.0]").count(), 2, "{answers}");
}

#[test]
fn keys_open_the_modules_of_their_tenant_only() {
    let world = World::new();
    let [a, b] = &world.keys;
    has(&world.post("/v1/call/math/half", b, "[1]"), 401, "key");
    has(&world.post("/v1/call/math/half", "", "[1]"), 401, "key");
    has(&world.post("/v1/call/missing/half", a, "[1]"), 401, "key");
    has(&world.post("/v1/call/other/half", b, "[1]"), 200, "0.5");
    has(&world.get("/v1/stats", "wrong"), 401, "key");
    has(&world.get("/v1/call/math/half", a), 405, "method");
    has(&world.get("/etc/passwd", a), 404, "nothing here");
}

#[test]
fn each_tenant_is_counted() {
    let world = World::new();
    let [a, b] = &world.keys;
    world.is_well();
    world.call("trap", "[]");
    world.post("/v1/call/math/half", b, "[1]");
    // An answer may be there before its call is counted.
    let counted = |_: &u32| world.get("/v1/stats", a).contains("\"invocations\":2");
    assert!((0..100_000).find(counted).is_some());
    has(&world.get("/v1/stats", a), 200, "\"invocations\":2");
    has(&world.get("/v1/stats", a), 200, "\"traps\":1");
    has(&world.get("/v1/stats", b), 200, "\"invocations\":0");
    has(&world.get("/metrics", a), 404, "nothing here");
    let operator = World { address: world.operator, ..world };
    let metrics = operator.get("/metrics", "");
    has(&operator.get("/v1/stats", &operator.keys[0]), 404, "nothing here");
    has(&metrics, 200, "exocell_invocations_total{tenant=\"a\"} 2");
    // What others try with keys of theirs is not a's.
    has(&metrics, 200, "exocell_denials_total{tenant=\"a\"} 0");
    has(&metrics, 200, "exocell_traps_total{tenant=\"b\"} 0");
}

#[test]
fn stats_and_metrics_say_how_memories_lie() {
    for slots in [Slots::Guarded, Slots::Compact] {
        let world = World::with(Duration::from_secs(60), slots);
        let stats = world.get("/v1/stats", &world.keys[0]);
        let kind = match slots {
            Slots::Compact => "compact",
            Slots::Guarded if Slots::share_guards() => "colorguard",
            Slots::Guarded => "guarded",
        };
        has(&stats, 200, &format!("\"slots\":\"{kind}\""));
        let operator = World { address: world.operator, ..world };
        let metrics = operator.get("/metrics", "");
        has(&metrics, 200, &format!("exocell_slots{{kind=\"{kind}\"}} 50"));
    }
}

#[test]
fn large_and_malformed_requests_are_refused() {
    let world = World::new();
    has(&world.call("half", &" ".repeat(1001)), 413, "too long");
    has(&world.send(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(4000))), 431, "too long");
    has(
        &world.send("POST / HTTP/1.1\r\nContent-Length: 18446744073709551617\r\n\r\n"),
        400,
        "number",
    );
    has(
        &world.send("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        400,
        "plain",
    );
    has(&world.send("\u{16}\u{3}\u{1}\0 nonsense\r\n\r\n"), 400, "malformed");
    let deep = "[".repeat(900);
    has(&world.call("half", &deep), 400, "no array");
    world.is_well();
}

#[test]
fn slow_clients_are_cut_off_and_do_not_keep_others_out() {
    let world = World::with(Duration::from_secs(2), Slots::Guarded);
    // More than may be connected at once: nothing, half a head, half a body.
    let slow: Vec<TcpStream> = (0..30)
        .map(|index| {
            let mut stream = world.connect();
            let text = match index % 3 {
                0 => String::new(),
                1 => "POST /v1/call/math/half HTTP/1.1\r\nAuth".to_owned(),
                _ => "POST /v1/call/math/half HTTP/1.1\r\nContent-Length: 3\r\n\r\n[".to_owned(),
            };
            stream.write_all(text.as_bytes()).unwrap();
            stream
        })
        .collect();
    world.is_well();
    let mut told = 0;
    for (index, mut stream) in slow.into_iter().enumerate() {
        let mut answer = String::new();
        // One that had to go while bytes of it were not read is reset.
        let _ = stream.read_to_string(&mut answer);
        let is_told = answer.starts_with("HTTP/1.1 408 ");
        assert!(is_told || answer.is_empty(), "{index}: {answer}");
        assert!(!(is_told && index % 3 == 0), "{index} has said nothing");
        told += u32::from(is_told);
    }
    // The others had to go before their time, for those that came later.
    assert!(told < 20, "{told} of 30 had their whole time");
}

#[test]
fn who_has_no_key_keeps_nobody_out() {
    // Nobody's time is up before the test is over.
    let world = World::with(Duration::from_secs(600), Slots::Guarded);
    let dripping: Vec<TcpStream> = (0..200)
        .map(|index| {
            let mut stream = world.connect();
            let idle = format!(
                "GET /v1/stats HTTP/1.1\r\nAuthorization: Bearer {}\r\n\r\n",
                world.keys[1]
            );
            let text = if index % 2 == 0 { "POST /v1/call" } else { &idle };
            let _ = stream.write_all(text.as_bytes());
            stream
        })
        .collect();
    for _ in 0..20 {
        world.is_well();
    }
    drop(dripping);
}

#[test]
fn one_tenants_loops_leave_anothers_calls_alone() {
    let world = World::new();
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| has(&world.spin(), 200, "deadline"));
        }
        for _ in 0..10 {
            has(&world.post("/v1/call/other/half", &world.keys[1], "[5]"), 200, "2.5");
        }
    });
}

#[test]
fn modules_come_and_go_while_others_are_served() {
    let world = World::new();
    let [a, b] = &world.keys;
    let reload = || world.service.reload(|error| panic!("{error}")).unwrap();
    let half = |module: &str, key: &str| world.post(&format!("/v1/call/{module}/half"), key, "[4]");
    world.store.remove("other").unwrap();
    let caps = caps("");
    assert!(world.store.add("more", "b", MODULE.as_bytes(), &caps).unwrap().key.is_none());
    let key = world.store.add("third", "c", MODULE.as_bytes(), &caps).unwrap().key.unwrap();
    has(&half("other", b), 200, "2.0");
    reload();
    has(&half("other", b), 401, "key");
    has(&half("more", b), 200, "2.0");
    has(&half("third", &key), 200, "2.0");
    has(&half("math", a), 200, "2.0");
    has(&world.get("/v1/stats", b), 200, "\"invocations\":");
    // A tenant that has lost its key gets another, and the one that it had is none then.
    let another = world.store.rekey("b").unwrap();
    assert!(matches!(world.store.rekey("d"), Err(StoreError::NoTenant(_))));
    reload();
    has(&half("more", b), 401, "");
    has(&half("more", &another), 200, "2.0");
    let b = &another;
    // Another one of the same name is another module.
    world.store.remove("more").unwrap();
    let text = MODULE.replace("f64.const 2", "f64.const 4");
    world.store.add("more", "b", text.as_bytes(), &caps).unwrap();
    reload();
    has(&half("more", b), 200, "1.0");
}

#[test]
fn a_damaged_module_is_left_out_and_named() {
    let world = World::new();
    let path = world.dir.path().join("other.wasm");
    std::fs::write(path, MODULE.replace("f64.const 2", "f64.const 3")).unwrap();
    // What was loaded before is still there; who comes later finds the damage.
    world.service.reload(|error| panic!("{error}")).unwrap();
    let pool = Pool { isolates: 50, stacks: 50, ..Pool::default() };
    let refused = Service::new(&world.store, pool, Limits::default(), Box::new(|_, _| Ok(None)));
    let why = refused.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(why.contains("other.wasm") && why.contains("damaged"), "{why}");
}

#[test]
fn a_tenant_has_half_of_the_connections_and_no_more() {
    let world = World::new();
    let caps = caps("[time]\ndeadline = \"10m\"");
    world.store.add("endless", "a", MODULE.as_bytes(), &caps).unwrap();
    world.service.reload(|error| panic!("{error}")).unwrap();
    // One more than may be: the one that is answered is refused, the others go on for ever.
    let (send, answers) = mpsc::channel();
    for _ in 0..11 {
        let (send, mut stream) = (send.clone(), world.connect());
        let key = &world.keys[0];
        let request = format!(
            "POST /v1/call/endless/spin HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\
             Connection: close\r\nContent-Length: 2\r\n\r\n[]"
        );
        std::thread::spawn(move || {
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            drop(send.send(answer));
        });
    }
    has(&answers.recv().unwrap(), 429, "too many calls");
    has(&world.post("/v1/call/other/half", &world.keys[1], "[5]"), 200, "2.5");
}

#[test]
fn two_tenants_cannot_take_all_connections() {
    let world = World::new();
    let caps = caps("[time]\ndeadline = \"10m\"");
    world.store.add("spin-a", "a", MODULE.as_bytes(), &caps).unwrap();
    world.store.add("spin-b", "b", MODULE.as_bytes(), &caps).unwrap();
    let key = world.store.add("third", "c", MODULE.as_bytes(), &caps).unwrap().key.unwrap();
    world.service.reload(|error| panic!("{error}")).unwrap();
    let (send, answers) = mpsc::channel();
    for at in 0..20 {
        let (send, mut stream) = (send.clone(), world.connect());
        let (module, key) = [("spin-a", &world.keys[0]), ("spin-b", &world.keys[1])][at % 2];
        let request = format!(
            "POST /v1/call/{module}/spin HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\
             Connection: close\r\nContent-Length: 2\r\n\r\n[]"
        );
        std::thread::spawn(move || {
            let _ = stream.write_all(request.as_bytes());
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            drop(send.send(answer));
        });
    }
    // At most 15 of 20 run: a quarter is for tenants with few.
    for _ in 0..5 {
        has(&answers.recv().unwrap(), 429, "too many calls");
    }
    has(&world.post("/v1/call/third/half", &key, "[5]"), 200, "2.5");
    assert!(answers.try_recv().is_err());
}

#[test]
fn what_is_damaged_keeps_no_other_module_from_being_served() {
    let world = World::new();
    let entry = world.dir.path().join("other.json");
    let whole = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
    let key = world.store.add("new", "c", MODULE.as_bytes(), &caps("")).unwrap().key.unwrap();
    let mut refused = Vec::new();
    world.service.reload(|error| refused.push(error.to_string())).unwrap();
    let [why] = &refused[..] else { panic!("{refused:?}") };
    assert!(why.contains("other.json is damaged") && why.contains("module rm other"), "{why}");
    has(&world.post("/v1/call/new/half", &key, "[5]"), 200, "2.5");
    has(&world.post("/v1/call/other/half", &world.keys[1], "[5]"), 401, "");
    // What is another module's is none of this name.
    std::fs::copy(world.dir.path().join("math.json"), &entry).unwrap();
    assert_eq!(world.store.list().unwrap().damaged.len(), 1);
    world.store.remove("other").unwrap();
    assert!(world.store.list().unwrap().damaged.is_empty());
    world.store.add("other", "b", MODULE.as_bytes(), &caps("")).unwrap();
    world.service.reload(|error| panic!("{error}")).unwrap();
    has(&world.post("/v1/call/other/half", &world.keys[1], "[5]"), 200, "2.5");
}

#[test]
fn a_tenant_whose_key_nobody_was_told_gets_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = ModuleStore::open(dir.path()).unwrap();
    store.add("one", "a", MODULE.as_bytes(), &caps("")).unwrap();
    // As after a kill before the key was written.
    let key = dir.path().join("tenants/a.json");
    std::fs::remove_file(&key).unwrap();
    let said = store.key_hash("a").unwrap_err().to_string();
    assert!(said.contains("exocell module key a"), "{said}");
    store.rekey("a").unwrap();
    std::fs::write(&key, "{").unwrap();
    let said = store.key_hash("a").unwrap_err().to_string();
    assert!(said.contains("a.json is damaged") && said.contains("module key a"), "{said}");
    store.rekey("a").unwrap();
    store.key_hash("a").unwrap();
    // One without a module keeps its key, and one that never had any gets none.
    store.remove("one").unwrap();
    store.rekey("a").unwrap();
    assert!(matches!(store.rekey("b"), Err(StoreError::NoTenant(_))));
    // What is left of a module that is half gone can be removed.
    std::fs::write(dir.path().join("half.wasm"), "").unwrap();
    store.remove("half").unwrap();
    assert!(matches!(store.remove("half"), Err(StoreError::NotFound(_))));
}

#[test]
fn the_store_keeps_modules_and_no_keys() {
    let dir = tempfile::tempdir().unwrap();
    let store = ModuleStore::open(dir.path()).unwrap();
    let key = store.add("one", "a", MODULE.as_bytes(), &caps("")).unwrap().key.unwrap();
    assert!(store.add("two", "a", MODULE.as_bytes(), &caps("")).unwrap().key.is_none());
    let taken = store.add("one", "b", MODULE.as_bytes(), &caps(""));
    assert!(matches!(taken, Err(StoreError::Taken(_))));
    for name in ["", ".hidden", "../up", "a/b", "Upper", "-flag", &"x".repeat(65)] {
        let refused = store.add(name, "a", MODULE.as_bytes(), &caps(""));
        assert!(matches!(refused, Err(StoreError::Name(_))), "{name}");
    }
    let bare = CapabilitySet::nothing();
    assert!(matches!(store.add("bare", "a", MODULE.as_bytes(), &bare), Err(StoreError::NoMemory)));
    let names: Vec<String> =
        store.list().unwrap().entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["one", "two"]);
    let kept = std::fs::read_to_string(dir.path().join("tenants/a.json")).unwrap();
    assert!(!kept.contains(&key));
    store.remove("one").unwrap();
    assert!(matches!(store.remove("one"), Err(StoreError::NotFound(_))));
    assert_eq!(store.list().unwrap().entries.len(), 1);
}

#[test]
fn what_is_added_is_whole_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = ModuleStore::open(dir.path()).unwrap();
    let all = || {
        let files = |dir: &std::path::Path| {
            let names = std::fs::read_dir(dir).unwrap();
            names.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
        };
        let (mut own, tenants): (Vec<String>, Vec<String>) =
            (files(dir.path()), files(&dir.path().join("tenants")));
        own.retain(|name| !["lock", "tenants"].contains(&name.as_str()));
        [own, tenants].concat()
    };
    // What was killed meanwhile has left its parts.
    std::fs::write(dir.path().join("one.partial-1"), "x").unwrap();
    std::fs::write(dir.path().join("tenants/a.partial-1"), "x").unwrap();
    // Where a part cannot be written, nothing stays, and no key that nobody was told.
    let long = "x".repeat(60);
    std::fs::create_dir_all(dir.path().join(format!("{long}.partial-{}", std::process::id())))
        .unwrap();
    assert!(store.add(&long, "a", MODULE.as_bytes(), &caps("")).is_err());
    std::fs::remove_dir(dir.path().join(format!("{long}.partial-{}", std::process::id()))).unwrap();
    assert!(all().is_empty(), "{:?}", all());
    assert!(store.add("one", "a", MODULE.as_bytes(), &caps("")).unwrap().key.is_some());
    let mut left = all();
    left.sort();
    assert_eq!(left, ["a.json", "one.json", "one.wasm"]);
}

/// Makes the file `f`, which must not be there, and answers with the errno.
const MAKES: &str = r#"(module
  (import "wasi_snapshot_preview1" "path_open" (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (memory (export "memory") 1) (data (i32.const 0) "f")
  (func (export "make") (result i32)
    (call $open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 5)
      (i64.const 64) (i64.const 0) (i32.const 0) (i32.const 16))))"#;

#[test]
fn a_tenants_modules_share_its_changes_and_no_others() {
    let world = World::new();
    let folder = tempfile::tempdir().unwrap();
    let caps = caps(&format!(
        "[disk]\nsize = \"1M\"\n[[folder]]\nhost = \"{}\"\nguest = \"/f\"\nrights = [\"read\", \"overlay\"]",
        folder.path().display()
    ));
    for (name, tenant) in [("one", "a"), ("two", "a"), ("three", "b")] {
        world.store.add(name, tenant, MAKES.as_bytes(), &caps).unwrap();
    }
    world.service.reload(|error| panic!("{error}")).unwrap();
    let make = |name: &str, key: &str| world.post(&format!("/v1/call/{name}/make"), key, "[]");
    let [a, b] = &world.keys;
    has(&make("one", a), 200, "\"results\":[0]");
    has(&make("two", a), 200, "\"results\":[20]");
    has(&make("three", b), 200, "\"results\":[0]");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
