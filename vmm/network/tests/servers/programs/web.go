// Go's net/http at the socket of the first argument; over TLS with certificates of the folder
// of the second, if there is one.
package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
)

func main() {
	log.SetOutput(io.Discard)
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		panic(err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "[[%s]]\n", r.Host)
	})
	server := http.Server{Handler: handler}
	if dir := os.Args[2]; dir != "" {
		load := func(which string) *tls.Certificate {
			file := dir + "/" + which + ".pem"
			pair, err := tls.LoadX509KeyPair(file, file)
			if err != nil {
				panic(err)
			}
			return &pair
		}
		granted, other := load("granted"), load("other")
		choose := func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if hello.ServerName == "granted.test" {
				return granted, nil
			}
			return other, nil
		}
		listener = tls.NewListener(listener, &tls.Config{GetCertificate: choose})
	}
	panic(server.Serve(listener))
}
