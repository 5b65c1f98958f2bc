"""Right, then fast: errors and kernel times."""
import sys, time, torch, itertools, json, os
from torch.profiler import profile, ProfilerActivity
import atlas_lm.ops.chunk_walk.fused as cw
import atlas_lm.ops.linear_memory.fused as lf
from atlas_lm.ops.linear_memory import linear_memory
torch.manual_seed(0)
dev='cuda'
def make(B,T,H,F,V,dt,c=1,theta=False,chunk=64,seed=0):
    g=torch.Generator(device=dev).manual_seed(seed)
    r=lambda *s: torch.randn(*s,generator=g,device=dev)
    n=lambda x: x/x.norm(dim=-1,keepdim=True)
    x=dict(q=n(r(B,T,H,F)).to(dt),k=n(r(B,T,H,F)).to(dt),v=r(B,T,H,V).to(dt),eta=r(B,T,H).sigmoid()/chunk*4)
    x['log_alpha']=torch.nn.functional.logsigmoid(r(B,T,H)+4)
    if theta: x['theta']=(r(B,T,H)+2).sigmoid()
    if c>1: x['gamma']=r(B,T,H,c).sigmoid()/c
    x['memory']=r(B,H,V,F)*0.1
    return x
def run(x,form,d=None,**kw):
    x={k:(t if d is None else t.to(d)).detach().clone().requires_grad_() for k,t in x.items()}
    y,st=linear_memory(**x,form=form,**kw)
    outs={'y':y,'M':st.memory,'anc':st.anchor}
    if st.momentum is not None: outs['S']=st.momentum
    gg=torch.Generator(device=dev).manual_seed(3)
    ws=[torch.randn(o.shape,generator=gg,device=dev) for o in outs.values()]
    loss=sum((o.to(torch.float64)*w).sum() for o,w in zip(outs.values(),ws))
    gr=torch.autograd.grad(loss,list(x.values()))
    outs|={'d'+k:g for k,g in zip(x,gr)}
    return {k:o.detach().double() for k,o in outs.items()}
def check(name,x,**kw):
    tr=run(x,'parallel',torch.float64,**kw)
    a,b=run(x,'fused',**kw),run(x,'parallel',**kw)
    again=run(x,'fused',**kw)
    same=all(torch.equal(a[k],again[k]) for k in a)
    line=[]; worst=0
    for k in a:
        e=[((o[k]-tr[k]).norm()/tr[k].norm()).item() for o in (a,b)]
        worst=max(worst,e[0]/max(e[1],1e-9)); line.append(f"{k}:{e[0]:.1e}/{e[1]:.1e}")
    print(f"{name:34s} ratio {worst:5.2f} same {same}",' '.join(line),flush=True)
def bench(f,n=20):
    for _ in range(3): f()
    torch.cuda.synchronize()
    ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[n//2]
def prof(f,n=3):
    f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): f()
        torch.cuda.synchronize()
    rows=sorted(((e.key,e.self_device_time_total/n/1000,e.count/n) for e in p.key_averages()),key=lambda r:-r[1])
    return [(k[:44],round(t,3),c) for k,t,c in rows if t>0.008]
def speed(name,B,T,**kw):
    th=kw.pop('theta',False); c=kw.pop('c',1); 
    x=make(B,T,8,128,128,torch.bfloat16,c=c,theta=th)
    x={k:t.requires_grad_() for k,t in x.items()}
    dy=torch.randn_like(x['v'])
    def fwd():
        with torch.no_grad(): linear_memory(**x,form='fused',**kw)
    def both():
        y,_=linear_memory(**x,form='fused',**kw); torch.autograd.grad(y,list(x.values()),dy)
    tf,tb=bench(fwd),bench(both)
    torch.cuda.reset_peak_memory_stats(); both(); mem=torch.cuda.max_memory_allocated()/2**30
    print(f"## {name} {B}x{T}: fwd {tf:.3f} ms both {tb:.3f} ms = {B*T/tb/1e3:.1f} Mtok/s mem {mem:.2f}",flush=True)
    return both
if __name__=='__main__':
    t00=time.time()
    for th,c in ((False,1),(True,1),(False,16)):
        for B,T in ((16,4096),(1,65536)):
            both=speed(f"theta={th} c={c}",B,T,theta=th,c=c)
            for r in prof(both): print('   ',r)
    print('speed',time.time()-t00)
    for dt in (torch.float32,):
        for c,th in ((1,False),(1,True),(16,False),(16,True)):
            check(f"{dt} c={c} th={th}",make(2,330,2,128,128,dt,c=c,theta=th))
    check("bf16 odd sizes",make(2,130,2,72,40,torch.bfloat16,c=4,theta=True,chunk=16),chunk=16)
    check("fp32 odd sizes",make(2,130,2,72,40,torch.float32,c=4,theta=True,chunk=16),chunk=16)
    check("bf16 256",make(2,130,2,256,256,torch.bfloat16,c=16))
    cw.SHORTEST=2
    check("bf16 scan",make(1,1500,2,128,128,torch.bfloat16,c=16,theta=True))
    check("fp32 scan",make(1,1500,2,128,128,torch.float32,c=16,theta=True))
    cw.SHORTEST=8
    print('time',time.time()-t00)
