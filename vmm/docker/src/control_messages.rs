//! Messages of `moby.buildkit.v1.Control` and `moby.buildkit.v1.frontend.LLBBridge`, by their
//! numbers in BuildKit's protocol. Fields that nothing is done with are left out; those that would
//! have to be heeded are here, and refused where they say something.

use std::collections::BTreeMap;

use prost::Message;

/// A message without fields.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Nothing {}

/// `google.protobuf.Timestamp`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// `google.rpc.Status`
#[derive(Clone, PartialEq, Message)]
pub struct Failure {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub message: String,
}

/// `pb.Definition`: steps in BuildKit's own form.
#[derive(Clone, PartialEq, Message)]
pub struct Definition {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub steps: Vec<Vec<u8>>,
    /// Of each step, by its digest.
    #[prost(btree_map = "string, message", tag = "2")]
    pub notes: BTreeMap<String, Nothing>,
}

/// `pb.Op`: a source, or the end of a definition, whose input is the result.
#[derive(Clone, PartialEq, Message)]
pub struct Op {
    #[prost(message, repeated, tag = "1")]
    pub inputs: Vec<Input>,
    #[prost(message, optional, tag = "3")]
    pub source: Option<Source>,
}

/// `pb.Input`
#[derive(Clone, PartialEq, Message)]
pub struct Input {
    #[prost(string, tag = "1")]
    pub digest: String,
}

/// `pb.SourceOp`
#[derive(Clone, PartialEq, Message)]
pub struct Source {
    #[prost(string, tag = "1")]
    pub identifier: String,
}

/// `Exporter`
#[derive(Clone, PartialEq, Message)]
pub struct Exporter {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub attributes: BTreeMap<String, String>,
}

/// `CacheOptionsEntry`
#[derive(Clone, PartialEq, Message)]
pub struct CacheEntry {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub attributes: BTreeMap<String, String>,
}

/// `CacheOptions`
#[derive(Clone, PartialEq, Message)]
pub struct Cache {
    #[prost(string, tag = "1")]
    pub to: String,
    #[prost(string, repeated, tag = "2")]
    pub from: Vec<String>,
    #[prost(message, repeated, tag = "4")]
    pub exports: Vec<CacheEntry>,
    #[prost(message, repeated, tag = "5")]
    pub imports: Vec<CacheEntry>,
}

/// `SolveRequest` of `Control`
#[derive(Clone, PartialEq, Message)]
pub struct Solve {
    #[prost(string, tag = "1")]
    pub reference: String,
    #[prost(message, optional, tag = "2")]
    pub definition: Option<Definition>,
    /// What clients of old say instead of `exporters`.
    #[prost(string, tag = "3")]
    pub exporter: String,
    #[prost(btree_map = "string, string", tag = "4")]
    pub exporter_attributes: BTreeMap<String, String>,
    #[prost(string, tag = "5")]
    pub session: String,
    #[prost(string, tag = "6")]
    pub frontend: String,
    #[prost(btree_map = "string, string", tag = "7")]
    pub attributes: BTreeMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub cache: Option<Cache>,
    #[prost(string, repeated, tag = "9")]
    pub entitlements: Vec<String>,
    #[prost(btree_map = "string, message", tag = "10")]
    pub inputs: BTreeMap<String, Definition>,
    #[prost(bytes = "vec", optional, tag = "12")]
    pub policy: Option<Vec<u8>>,
    #[prost(message, repeated, tag = "13")]
    pub exporters: Vec<Exporter>,
    #[prost(bool, tag = "14")]
    pub exports_by_session: bool,
    #[prost(string, tag = "15")]
    pub policy_session: String,
    #[prost(bool, tag = "17")]
    pub proxy_network: bool,
}

/// `SolveResponse` of `Control`
#[derive(Clone, PartialEq, Message)]
pub struct Solved {
    #[prost(btree_map = "string, string", tag = "1")]
    pub said: BTreeMap<String, String>,
}

/// `StatusRequest`
#[derive(Clone, PartialEq, Message)]
pub struct StatusOf {
    #[prost(string, tag = "1")]
    pub reference: String,
}

/// `StatusResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Update {
    #[prost(message, repeated, tag = "1")]
    pub vertices: Vec<Vertex>,
    #[prost(message, repeated, tag = "2")]
    pub states: Vec<VertexState>,
    #[prost(message, repeated, tag = "3")]
    pub logs: Vec<Log>,
    #[prost(message, repeated, tag = "4")]
    pub warnings: Vec<Warning>,
}

/// `Vertex`: a step as it is shown.
#[derive(Clone, PartialEq, Message)]
pub struct Vertex {
    #[prost(string, tag = "1")]
    pub digest: String,
    #[prost(string, repeated, tag = "2")]
    pub inputs: Vec<String>,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(bool, tag = "4")]
    pub cached: bool,
    #[prost(message, optional, tag = "5")]
    pub started: Option<Timestamp>,
    #[prost(message, optional, tag = "6")]
    pub completed: Option<Timestamp>,
    #[prost(string, tag = "7")]
    pub error: String,
}

/// `VertexStatus`: how far a part of a step is.
#[derive(Clone, PartialEq, Message)]
pub struct VertexState {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub vertex: String,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(int64, tag = "4")]
    pub current: i64,
    #[prost(int64, tag = "5")]
    pub total: i64,
    #[prost(message, optional, tag = "6")]
    pub at: Option<Timestamp>,
    #[prost(message, optional, tag = "7")]
    pub started: Option<Timestamp>,
    #[prost(message, optional, tag = "8")]
    pub completed: Option<Timestamp>,
}

/// `VertexLog`
#[derive(Clone, PartialEq, Message)]
pub struct Log {
    #[prost(string, tag = "1")]
    pub vertex: String,
    #[prost(message, optional, tag = "2")]
    pub at: Option<Timestamp>,
    /// 1 or 2.
    #[prost(int64, tag = "3")]
    pub stream: i64,
    #[prost(bytes = "vec", tag = "4")]
    pub bytes: Vec<u8>,
}

/// `VertexWarning`
#[derive(Clone, PartialEq, Message)]
pub struct Warning {
    #[prost(string, tag = "1")]
    pub vertex: String,
    #[prost(int64, tag = "2")]
    pub level: i64,
    #[prost(bytes = "vec", tag = "3")]
    pub words: Vec<u8>,
}

/// `ListWorkersResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Workers {
    #[prost(message, repeated, tag = "1")]
    pub workers: Vec<Worker>,
}

/// `WorkerRecord`
#[derive(Clone, PartialEq, Message)]
pub struct Worker {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub labels: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "3")]
    pub platforms: Vec<Platform>,
    #[prost(message, optional, tag = "5")]
    pub version: Option<Version>,
}

/// `pb.Platform`
#[derive(Clone, PartialEq, Message)]
pub struct Platform {
    #[prost(string, tag = "1")]
    pub architecture: String,
    #[prost(string, tag = "2")]
    pub os: String,
}

/// `BuildkitVersion`
#[derive(Clone, PartialEq, Message)]
pub struct Version {
    #[prost(string, tag = "1")]
    pub package: String,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(string, tag = "3")]
    pub revision: String,
}

/// `InfoResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Info {
    #[prost(message, optional, tag = "1")]
    pub version: Option<Version>,
}

/// `DiskUsageRequest`
#[derive(Clone, PartialEq, Message)]
pub struct UsageOf {
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
    #[prost(int64, tag = "2")]
    pub age: i64,
}

/// `DiskUsageResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Usage {
    #[prost(message, repeated, tag = "1")]
    pub records: Vec<UsageRecord>,
}

/// `UsageRecord`
#[derive(Clone, PartialEq, Message)]
pub struct UsageRecord {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(bool, tag = "2")]
    pub mutable: bool,
    #[prost(int64, tag = "4")]
    pub bytes: i64,
    #[prost(message, optional, tag = "6")]
    pub created: Option<Timestamp>,
    #[prost(message, optional, tag = "7")]
    pub used: Option<Timestamp>,
    #[prost(int64, tag = "8")]
    pub uses: i64,
    #[prost(string, tag = "9")]
    pub description: String,
    #[prost(string, tag = "10")]
    pub kind: String,
}

/// `PruneRequest`
#[derive(Clone, PartialEq, Message)]
pub struct Prune {
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
    #[prost(bool, tag = "2")]
    pub all: bool,
    #[prost(int64, tag = "3")]
    pub keep_time: i64,
    #[prost(int64, tag = "4")]
    pub reserved: i64,
    #[prost(int64, tag = "5")]
    pub used_max: i64,
    #[prost(int64, tag = "6")]
    pub free_min: i64,
}

/// `PongResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Pong {
    #[prost(message, repeated, tag = "1")]
    pub of_frontends: Vec<Capability>,
    #[prost(message, repeated, tag = "2")]
    pub of_steps: Vec<Capability>,
    #[prost(message, repeated, tag = "3")]
    pub workers: Vec<Worker>,
}

/// `apicaps.APICap`
#[derive(Clone, PartialEq, Message)]
pub struct Capability {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(bool, tag = "2")]
    pub is_there: bool,
}

/// `SolveRequest` of `LLBBridge`
#[derive(Clone, PartialEq, Message)]
pub struct Step {
    #[prost(message, optional, tag = "1")]
    pub definition: Option<Definition>,
    #[prost(string, tag = "2")]
    pub frontend: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub attributes: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "12")]
    pub imports: Vec<CacheEntry>,
    #[prost(btree_map = "string, message", tag = "13")]
    pub inputs: BTreeMap<String, Definition>,
    #[prost(bytes = "vec", repeated, tag = "15")]
    pub policies: Vec<Vec<u8>>,
}

/// `SolveResponse` of `LLBBridge`
#[derive(Clone, PartialEq, Message)]
pub struct Stepped {
    #[prost(message, optional, tag = "3")]
    pub result: Option<Outcome>,
}

/// `Result`, of which one image is known
#[derive(Clone, PartialEq, Message)]
pub struct Outcome {
    /// As clients of old name it.
    #[prost(string, tag = "1")]
    pub named: String,
    #[prost(message, optional, tag = "3")]
    pub image: Option<Reference>,
    /// Of several platforms.
    #[prost(message, optional, tag = "4")]
    pub several: Option<References>,
}

/// `Ref`
#[derive(Clone, PartialEq, Message)]
pub struct Reference {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(message, optional, tag = "2")]
    pub definition: Option<Definition>,
}

/// `RefMap`
#[derive(Clone, PartialEq, Message)]
pub struct References {
    #[prost(btree_map = "string, message", tag = "1")]
    pub all: BTreeMap<String, Reference>,
}

/// `ReturnRequest`
#[derive(Clone, PartialEq, Message)]
pub struct Return {
    #[prost(message, optional, tag = "1")]
    pub result: Option<Outcome>,
    #[prost(message, optional, tag = "2")]
    pub error: Option<Failure>,
}

/// `EvaluateRequest`
#[derive(Clone, PartialEq, Message)]
pub struct Evaluate {
    #[prost(string, tag = "1")]
    pub reference: String,
}

/// `grpc.health.v1.HealthCheckResponse`
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Health {
    /// 1: it serves.
    #[prost(int32, tag = "1")]
    pub status: i32,
}
