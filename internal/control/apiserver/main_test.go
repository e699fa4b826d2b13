package apiserver_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/control/apiserver/liblog"
)

// writerDir makes the test binary a server that writes until it is killed; see TestKillKeepsWrites.
// With writerEtcd it uses that etcd, as the node writerNode.
const (
	writerDir  = "BARCHAN_TEST_WRITER_DIR"
	writerEtcd = "BARCHAN_TEST_WRITER_ETCD"
	writerNode = "writer"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerDir); dir != "" {
		if err := writeUntilKilled(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	liblog.RouteKlog(telemetry.Discard()) // before the etcd of a test logs through it
	os.Exit(m.Run())
}

// writeUntilKilled makes config maps and prints the name of each once it was acknowledged.
func writeUntilKilled(dir string) error {
	ctx := context.Background()
	cfg := apiserver.Config{DataDir: dir, Etcd: etcd.Config{NodeName: writerNode}}
	if e := os.Getenv(writerEtcd); e != "" {
		cfg.Etcd.Endpoints = []string{e}
	}
	s, err := apiserver.New(cfg)
	if err != nil {
		return err
	}
	if err := s.Start(ctx); err != nil {
		return err
	}
	c, err := kubernetes.NewForConfig(s.RESTConfig(apiserver.UserAdmin))
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cm-%06d", i)}}
		if _, err := c.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, cm.Name)
	}
}
